"""Full disks and damaged files: a clear typed error, nothing acked is lost, others are unaffected, and it goes on when there is room."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater as hw
from headwater.model.limits import KIB, MIB
from tests.crash.processes import Crew, Place
from tests.crash.workers import obey

pytestmark = pytest.mark.slow

STREAM, OTHER = "damage/events", "damage/other"
SIZES = [pytest.param(500, id="inline"), pytest.param(100 * KIB, id="journal")]


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        reason = "a small disk needs the right to mount one; the test with a limited process covers the rest"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _values(store: hw.Store, name: str = STREAM) -> list[bytes]:
    return [event.value.rstrip(b".") for event in store.stream(name).read()]


@pytest.mark.parametrize("size", SIZES)
def test_on_a_full_disk_writing_fails_reading_goes_on_and_what_waits_is_stored_first_when_there_is_room(
    tmp_path: Path, catalog_url: str | None, crew: Crew, size: int
) -> None:
    if catalog_url is not None:
        size = 100 * KIB  # Smaller events go into PostgreSQL, which is on another disk.
    with small_disk(tmp_path / "disk", 12 * MIB) as disk:
        place = Place(str(disk / "store"), catalog_url)
        with place.open(create=True) as store:
            stream = store.create_stream(STREAM)
            reader = crew.start(obey, place)
            with stream.writer() as writer, stream.writer("source") as named:
                given = [b"%d" % number for number in range(20)]
                for value in given:
                    writer.write(value.ljust(size, b"."), key="k").result()
                named.write(b"n1".ljust(size, b".")).result()
                given.append(b"n1")
                assert reader.ask("open", STREAM)[0]

                acked = len(given)
                with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                    while filler.write(b"." * KIB):
                        pass
                failed = None
                while failed is None:
                    # There may be some room in files that are there already.
                    given.append(b"%d" % len(given))
                    try:
                        writer.write(given[-1].ljust(size, b"."), key="k").result()
                        acked = len(given)
                    except hw.UnavailableError as error:
                        failed = error
                    assert len(given) < 5000
                assert "space" in str(failed)
                for _ in range(10):
                    given.append(b"%d" % len(given))
                    writer.write(given[-1].ljust(size, b"."), key="k")
                with pytest.raises(hw.UnavailableError):
                    writer.flush()
                named.write(b"n2".ljust(size, b"."))
                with pytest.raises(hw.UnavailableError):
                    named.flush()
                assert _values(store) == given[:acked]
                assert [value.rstrip(b".") for value in reader.ask("read", STREAM)[1]] == given[:acked], "others read, too"

                (disk / "filler").unlink()
                given.append(b"%d" % len(given))
                writer.write(given[-1].ljust(size, b"."), key="k")
                writer.flush()
                named.flush()
                assert named.last_number == 2
                stored = _values(store)
                assert [value for value in stored if value != b"n2"] == given
                assert stored.count(b"n2") == 1
            reader.kill()
        with place.open() as store:
            assert _values(store) == stored


@pytest.mark.parametrize("size", SIZES)
def test_a_process_at_its_file_size_limit_keeps_its_events_and_stores_them_in_order_when_it_is_raised(
    sqlite_place: Place, crew: Crew, size: int
) -> None:
    with sqlite_place.open() as store:
        store.create_stream(STREAM)
        worker = crew.start(obey, sqlite_place)
        worker.ask("open", STREAM, "source")
        given = [b"%d" % number for number in range(5)]
        assert worker.ask("write", STREAM, "source", [value.ljust(size, b".") for value in given])[0]
        worker.ask("limit_file_size", 4 * KIB)
        more = [b"%d" % number for number in range(5, 15)]
        worker.ask("give", STREAM, "source", [value.ljust(size, b".") for value in more])
        assert worker.ask("acks")[:2] == (False, "UnavailableError")
        assert [value.rstrip(b".") for value in worker.ask("read", STREAM)[1]] == given
        with store.stream(STREAM).writer() as writer:
            writer.write(b"another process").result()
        worker.ask("limit_file_size", None)
        assert worker.ask("give", STREAM, "source", [b"15"])[0]
        assert worker.ask("acks")[0]
        assert _values(store) == [*given, b"another process", *more, b"15"]


@pytest.fixture
def damaged(place: Place, crew: Crew) -> Iterator[hw.Store]:
    """A store whose streams lie in one journal of a killed process (STREAM and OTHER), and in the catalog."""
    with place.open() as store:
        for name in (STREAM, OTHER):
            store.create_stream(name)
        worker = crew.start(obey, place)
        for name in (STREAM, OTHER):
            worker.ask("open", name)
            assert worker.ask("write", name, None, [(b"%d" % number).ljust(100 * KIB, b".") for number in range(3)])[0]
            assert worker.ask("write", name, None, [b"3"])[0]
        worker.kill()
        yield store


def _extents(store: hw.Store, name: str) -> list[tuple[str, int, int]]:
    """(key, position, length) of a stream's extents in objects."""
    rows = store._engine.database.query(
        "SELECT o.key, e.position, e.length FROM extent e JOIN object o ON o.id = e.object JOIN segment s ON s.log = e.log "
        "JOIN stream t ON t.id = s.stream WHERE t.scope || '/' || t.name = ? ORDER BY e.first",
        (name,),
    )
    return [(key, position, length) for key, position, length in rows]


def _write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _flip(path: Path, offset: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)[0]
    _write_at(path, offset, bytes([byte ^ 1]))


def _check_damaged(store: hw.Store, key: str) -> None:
    """Reading what is damaged says where; everything else goes on."""
    stream = store.stream(STREAM)
    for read in (lambda: _values(store), stream.to_arrow, lambda: [found.to_arrow() for found in stream.ranges()]):
        with pytest.raises(hw.CorruptDataError) as failure:
            read()
        assert failure.value.object == key and key in str(failure.value)
    before = _values(store, OTHER)
    assert before[-1] == b"3"
    for name in (STREAM, OTHER):
        with store.stream(name).writer() as writer:
            writer.write(b"4")
    assert _values(store, OTHER) == [*before, b"4"]
    tail = [event.value for event in stream.read(start=hw.Cut(store.id, {STREAM: stream.tail().streams[STREAM]}))]
    assert tail == [], "its tail can still be found"


def test_garbage_behind_the_last_commit_of_a_killed_process_is_ignored(damaged: hw.Store, place: Place) -> None:
    key, position, length = _extents(damaged, OTHER)[-1]
    path = Path(place.url, key)
    size = path.stat().st_size
    used = position + length + -length % 8
    assert size > used, "a killed process leaves what it had preallocated"
    _write_at(path, used, b"HW torn \xff" * 10_000)
    for name in (STREAM, OTHER):
        assert _values(damaged, name) == [b"0", b"1", b"2", b"3"]
    with damaged.stream(STREAM).writer() as writer:
        writer.write(b"4".ljust(100 * KIB, b"."))
    assert _values(damaged) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("place_in_block", [0, 20, 5000, -1])
def test_a_flipped_bit_in_a_journal_is_a_corrupt_data_error_that_names_it(damaged: hw.Store, place: Place, place_in_block: int) -> None:
    key, position, length = _extents(damaged, STREAM)[0]
    _flip(Path(place.url, key), position + place_in_block % length)
    _check_damaged(damaged, key)
    assert _values(damaged, OTHER)[:4] == [b"0", b"1", b"2", b"3"], "it lies in the same file"


def test_a_missing_journal_is_a_corrupt_data_error_that_names_it(place: Place, crew: Crew) -> None:
    with place.open() as store:
        for name in (STREAM, OTHER):
            store.create_stream(name)
            worker = crew.start(obey, place)
            worker.ask("open", name)
            assert worker.ask("write", name, None, [b"0".ljust(100 * KIB, b"."), b"1"])[0]
            assert worker.ask("write", name, None, [b"2", b"3"])[0]
            worker.kill()
        [(key, *_)] = _extents(store, STREAM)
        Path(place.url, key).unlink()
        _check_damaged(store, key)
    with place.open() as store, pytest.raises(hw.CorruptDataError):
        _values(store)


def test_a_journal_cut_short_is_a_corrupt_data_error_that_names_it(damaged: hw.Store, place: Place) -> None:
    key, position, length = _extents(damaged, STREAM)[0]
    path = Path(place.url, key)
    with path.open("r+b") as file:
        file.truncate(position + length - 1)
    with pytest.raises(hw.CorruptDataError) as failure:
        _values(damaged)
    assert failure.value.object == key
    with damaged.stream(OTHER).writer() as writer:
        writer.write(b"4").result()


def test_a_flipped_bit_in_the_catalogs_own_block_is_a_corrupt_data_error(damaged: hw.Store) -> None:
    [(log,)] = damaged._engine.database.query("SELECT log FROM segment WHERE stream = ?", (damaged.stream(STREAM).id,))
    [(data,)] = damaged._engine.database.query("SELECT data FROM inline_block WHERE log = ?", (log,))
    broken = bytearray(data)
    broken[-1] ^= 1
    damaged._engine.database.write(lambda tx: tx.run("UPDATE inline_block SET data = ? WHERE log = ?", (bytes(broken), log)))
    with pytest.raises(hw.CorruptDataError):
        _values(damaged)
    assert _values(damaged, OTHER) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["flipped", "cut short"])
def test_what_lies_before_and_behind_damage_is_read_by_every_reader(tmp_path: Path, size: int, how: str) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        stream = store.create_stream(STREAM)
        cuts = []
        with stream.writer() as writer:
            for number in range(5):
                cuts.append(stream.tail())
                writer.write((b"%d" % number).ljust(size, b".")).result()
        is_inline = not _extents(store, STREAM)
        if not is_inline:
            key, position, length = _extents(store, STREAM)[2]
            path = tmp_path / "store" / key
            os.truncate(path, position + length - 1) if how == "cut short" else _flip(path, position + length // 2)
        else:
            cut = "substr(data, 1, 100)" if how == "cut short" else "CAST(data || x'00' AS BLOB)"
            store._engine.database.write(lambda tx: tx.run(f"UPDATE inline_block SET data = {cut} WHERE first = 2"))

        def read(found: Iterator[bytes]) -> tuple[list[bytes], hw.CorruptDataError]:
            values = []
            with pytest.raises(hw.CorruptDataError) as failure:
                for value in found:
                    values.append(value[:1])
            return values, failure.value

        with store.reader_group("g", [STREAM]).reader("r") as reader:
            for found in (
                (event.value for event in stream.read()),
                (event.value for event in stream.read(follow=True)),
                (value.as_py() for part in stream.ranges() for batch in part.to_batches() for value in batch.column("value")),
                (event.value for event in reader),
            ):
                values, error = read(found)
                assert values == [b"0", b"1"]
                assert error.object is not None
                assert {"stream": STREAM, "segment": 0, "first": 2, "end": 3}.items() <= error.facts.items()
        if is_inline or how == "flipped":
            assert [event.value[:1] for event in stream.read(start=cuts[3])] == [b"3", b"4"], "a program can go on behind it"
