"""Named writers: source numbers, taking over, and always a prefix."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from tests.contract.writing import WAIT_SECONDS, batch, values
from tests.crash.processes import wait_until


def test_a_named_writer_takes_the_source_s_own_numbers_with_gaps(store: hw.Store) -> None:
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    with stream.writer("source-1") as writer:
        assert (writer.id, writer.last_number) == ("source-1", 0)
        first = writer.write("10", number=10, key="a")
        writer.write("20", number=20, key="b")
        writer.write("21", key="c")
        again = [writer.write("no", number=number) for number in (1, 10, 15, 21)]
        writer.write_batch(batch(b"30a", b"30b"), number=30)
        batch_again = writer.write_batch(batch(b"no"), number=30)
        assert not first.duplicate and all(ack.duplicate for ack in [*again, batch_again])
        assert [ack.result(WAIT_SECONDS) for ack in [*again, batch_again]] == [None] * 5
        writer.flush()
        assert writer.last_number == 30
    with stream.writer("source-1") as writer:
        assert writer.last_number == 30
        assert writer.write("no", number=30).duplicate
        assert not writer.write("31").duplicate
    with stream.writer("source-2") as other:
        assert other.last_number == 0
    assert sorted(values(stream)) == [b"10", b"20", b"21", b"30a", b"30b", b"31"]


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", 2**62])
def test_what_is_no_source_number_is_refused(local_store: hw.Store, number: Any) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer("w") as writer:
        with pytest.raises(hw.InvalidRequestError, match="source number"):
            writer.write("x", number=number)
        with pytest.raises(hw.InvalidRequestError, match="source number"):
            writer.write_batch(batch(b"x"), number=number)
        writer.write("y", number=2**62 - 1)
    assert values(stream) == [b"y"]


def test_only_a_named_writer_has_numbers(local_store: hw.Store) -> None:
    stream = local_store.create_stream("a/x")
    with stream.writer() as writer:
        for number in range(1, 50):
            writer.write("there is a run open now")
            with pytest.raises(hw.InvalidRequestError, match="only a named writer"):
                writer.write("x", number=number)
        with pytest.raises(hw.InvalidRequestError, match="only a named writer"):
            writer.write_batch(batch(b"x"), number=1)
        with pytest.raises(hw.InvalidRequestError, match="only a named writer"):
            _ = writer.last_number
        assert writer.id is None
    with stream.writer("w") as writer, pytest.raises(hw.InvalidRequestError, match="no rows"):
        writer.write_batch(batch(), number=1)
    id: Any
    for id in ("", "a/b", "a b", 7):
        with pytest.raises(hw.InvalidRequestError, match="writer"):
            stream.writer(id)


def test_opening_a_writer_again_in_this_process_fences_the_older_one(store: hw.Store) -> None:
    stream = store.create_stream("a/x")
    older = stream.writer("w")
    older.write("one", number=1)
    older.flush()
    newer = stream.writer("w")
    assert newer.last_number == 1
    ack = older.write("stale", number=2)
    with pytest.raises(hw.FencedError, match="'w'"):
        older.flush()
    for call in (
        lambda: ack.result(WAIT_SECONDS),
        lambda: older.write("stale", number=3),
        lambda: older.write_batch(batch(b"stale")),
    ):
        with pytest.raises(hw.FencedError):
            call()
    older.close()  # That it was fenced was told.
    newer.write("two", number=2)
    newer.close()
    assert values(stream) == [b"one", b"two"]


@pytest.mark.parametrize("tell", ["flush", "write", None])
def test_what_ended_a_writer_is_told_once(local_store: hw.Store, tell: str | None) -> None:
    stream = local_store.create_stream("a/x")
    older = stream.writer("w")
    stream.writer("w").close()
    ack = older.write("stale")
    wait_until(lambda: ack.done)
    if tell is not None:
        with pytest.raises(hw.FencedError):
            older.flush() if tell == "flush" else older.write("more")
        older.close()
    else:
        with pytest.raises(hw.FencedError):
            older.close()
    older.close()
    local_store.close()


TAKE_OVER = """
import sys, headwater as hw
with hw.open(sys.argv[1], catalog=sys.argv[2] or None) as store, store.stream("a/x").writer("w") as writer:
    print(writer.last_number)
    writer.write("theirs", number=5)
"""


@pytest.mark.slow
def test_opening_a_writer_in_another_process_fences_the_older_one(store: hw.Store, tmp_path: Path, catalog_url: str | None) -> None:
    stream = store.create_stream("a/x")
    older = stream.writer("w")
    older.write("ours", number=3)
    older.flush()
    command = [sys.executable, "-c", TAKE_OVER, str(tmp_path / "store"), catalog_url or ""]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_SECONDS).stdout == "3\n"
    older.write("stale", number=4)
    with pytest.raises(hw.FencedError):
        older.flush()
    older.abandon()
    assert values(stream) == [b"ours", b"theirs"]


def test_what_is_stored_of_a_named_writer_is_always_a_prefix(store: hw.Store) -> None:
    """Looked at again and again while it writes and its segments are split and merged under it."""
    stream = store.create_stream("a/x", scaling=hw.Scaling.fixed(2))
    total, done = 3000, threading.Event()

    def scale() -> int:
        times = 0
        while not done.is_set():
            opened = sorted(stream.segments(), key=lambda segment: segment.start)
            if len(opened) > 3:
                stream.merge([opened[0].number, opened[1].number])
            else:
                stream.split(opened[times % len(opened)].number)
            times += 1
        return times

    def look() -> int:
        looks = 0
        while not done.is_set():
            found = sorted(int(value) for value in values(stream))
            assert found == list(range(1, len(found) + 1))
            looks += 1
        return looks

    with ThreadPoolExecutor(2) as pool, stream.writer("w") as writer:
        scaled, looked = pool.submit(scale), pool.submit(look)
        try:
            for number in range(1, total + 1):
                writer.write(b"%d" % number, key=number % 17, number=number)
                if number % 100 == 0:
                    writer.flush()
        finally:
            done.set()
        assert scaled.result(WAIT_SECONDS) > 1 and looked.result(WAIT_SECONDS) > 1
    by_key: dict[bytes, list[int]] = {}
    for event in stream.read():
        by_key.setdefault(event.key, []).append(int(event.value))
    assert all(found == sorted(found) for found in by_key.values())
    assert sorted(number for found in by_key.values() for number in found) == list(range(1, total + 1))
