"""Memory goes back to the system after a burst of events that were given one by one, and stays at hand otherwise."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import headwater as hw
from headwater.segments import memory
from headwater.segments.memory import give_back

VALUE = bytes(1000)
BATCH = pa.record_batch({"value": pa.array([VALUE] * 200, pa.binary())})


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[hw.Stream]:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        yield store.create_stream("a/stream")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    given = threading.Event()
    monkeypatch.setattr(memory, "give_back", given.set)
    monkeypatch.setattr(memory, "_BURST_BYTES", 100_000)
    monkeypatch.setattr(memory, "_PAUSE_SECONDS", 0.01)
    return given


def _write(writer: hw.Writer, count: int) -> None:
    for _ in range(count):
        writer.write(VALUE)
    writer.flush()


def test_when_nothing_follows(stream: hw.Stream, given: threading.Event) -> None:
    with stream.writer() as writer:
        _write(writer, 300)
        assert given.wait(10)
        given.clear()
        _write(writer, 20)
        assert not given.wait(0.1), "that was no burst"


def test_not_all_the_time(stream: hw.Stream, given: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    with stream.writer() as writer:
        _write(writer, 300)
        assert given.wait(10)
        given.clear()
        _write(writer, 300)
        assert not given.wait(0.1), "that was just now"
        monkeypatch.setattr(memory, "_AGAIN_SECONDS", 0.0)
        assert given.wait(10)


def test_when_batches_follow(stream: hw.Stream, given: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PAUSE_SECONDS", 1000.0)
    with stream.writer() as writer:
        _write(writer, 300)
        assert not given.is_set()
        writer.write_batch(BATCH).result()
        assert given.wait(10)
        given.clear()
        writer.write_batch(BATCH).result()
        assert not given.wait(0.05), "there is nothing more to give back"


@pytest.mark.skipif("not __import__('sys').platform.startswith('linux')", reason="where /proc tells")
def test_the_system_has_it_then() -> None:
    kept = [bytes(900) for _ in range(100_000)][::1000]
    before = _resident_bytes()
    give_back()
    assert before - _resident_bytes() > 50_000_000
    assert len(kept) == 100


def _resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
