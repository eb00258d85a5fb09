"""Golden files stay readable: blocks byte by byte, and a store of each catalog format."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.schema import SCHEMA, open_catalog
from headwater.catalog.sqlite import SqliteDatabase
from headwater.check import check_store
from headwater.segments.block import decode, verify
from tests.compat import golden
from tests.tables import tables_of

HERE = Path(__file__).parent
_EVENTS = ("events", "typed", "truncated", "fork", "read")
STORES = [golden.STORES / f"format-{number}.tar.gz" for number in range(1, SCHEMA.format + 1)]


@pytest.mark.parametrize("name", ["opaque.hwb", "plain.hwb", "typed.hwb"])
def test_a_block_is_encoded_to_the_bytes_it_always_was(name: str) -> None:
    made, kept = golden.blocks()[name], (HERE / "blocks" / name).read_bytes()
    if name == "typed.hwb":
        # Arrow may arrange its own message otherwise some day; ours is the header, up to its checksum and lengths.
        made, kept = made[:16], kept[:16]
    assert made == kept


@pytest.mark.parametrize("name", ["opaque.hwb", "plain.hwb", "typed.hwb"])
def test_a_golden_block_is_decoded(name: str) -> None:
    data = pa.py_buffer((HERE / "blocks" / name).read_bytes())
    verify(data, int.from_bytes(data.to_pybytes()[16:20], "little"), name)
    typed = name == "typed.hwb"
    chunk, version = decode(data, {7: golden.SCHEMA}.__getitem__, name)
    assert version == (7 if typed else 1)
    assert chunk.columns.to_pylist() == (golden.TYPED if typed else [{"value": value} for value, _ in golden.OPAQUE_EVENTS])
    if name == "plain.hwb":
        assert chunk.keys is None and chunk.times is None
    else:
        assert chunk.keys is not None and chunk.keys.to_pylist() == [key for _, key in golden.OPAQUE_EVENTS]
        assert chunk.times is not None and chunk.times.to_pylist() == golden.TIMES


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / "store"


@pytest.fixture(params=STORES, ids=lambda path: path.name.partition(".")[0])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hw.Store]:
    """A golden store, opened by the present code from a copy."""
    with hw.open(unpack(request.param, tmp_path), create=False, upkeep=False) as store:
        yield store


@pytest.mark.parametrize("format", range(1, SCHEMA.format + 1))
def test_a_golden_store_has_the_tables_of_its_format(tmp_path: Path, format: int) -> None:
    database = SqliteDatabase(str(unpack(STORES[format - 1], tmp_path) / "catalog.sqlite"))
    found = database.query("SELECT format, schema_hash FROM store")
    database.close()
    assert found == [(format, SCHEMA.hash_of(format))], (
        "schema.sql has changed. Until 0.1.0 is released, make the golden store anew: python -m tests.compat.golden. "
        "After that, a change of the schema is a new format with a migration: see CONTRIBUTING.md"
    )


def test_an_opened_golden_store_has_the_tables_of_a_new_store(store: hw.Store) -> None:
    new = SqliteDatabase(":memory:")
    open_catalog(new, "sqlite", create=True)
    assert tables_of(store._engine.database) == tables_of(new)


def test_a_golden_store_is_read(store: hw.Store) -> None:
    assert store.streams() == [f"golden/{name}" for name in ("bytes", "events", "fork", "read", "truncated", "typed")]
    assert store.streams(label="kept") == ["golden/events"]
    events = store.stream("golden/events")
    assert events.epoch == 2 and [segment.number for segment in events.segments()] == [3]
    for stream in (events, store.stream("golden/fork")):
        by_key: dict[bytes, list[bytes]] = {}
        for event in stream.read():
            by_key.setdefault(event.key, []).append(event.value)
        assert by_key == {
            b"%d" % key: [b"%d" % n for n in range(20) if n % 3 == key] + ([golden.LARGE] if key == 0 else []) for key in range(3)
        }
    assert [event.time == golden.TIMES[0] for event in events.read(end=events.cut_at(next(events.read()).time))] == []
    assert sum(event.time == golden.TIMES[0] for event in events.read()) == 5
    typed = store.stream("golden/typed")
    assert typed.schema == golden.SCHEMA and [event.value for event in typed.read()] == golden.TYPED
    assert [event.key for event in typed.read()] == [b"a", b"1099511627776", b"3"]
    raw = store.stream("golden/bytes")
    assert raw.is_sealed and raw.byte_reader(3).read() == b"3456789"
    truncated = store.stream("golden/truncated")
    assert [(event.value, event.position) for event in truncated.read()] == [(b"kept", (0, 1))]
    assert store.stream("golden/fork").origin == "golden/events"
    tagged = store.tags()["golden"]
    assert [event.value["id"] for event in typed.read(end=tagged)] == [1, 2**40, 3]


def test_a_golden_store_keeps_tables_markers_and_the_positions_of_readers(store: hw.Store) -> None:
    table = store.table("golden/table")
    assert list(table.items()) == [("kept", hw.Entry(b"new", 4))]
    assert store.marker("golden") == golden.MARKER
    assert list(store.revisioned("golden/state").read()) == [(1, b"state")]
    with store.reader_group("golden").reader("reader") as reader:
        event = reader.read()
        assert event is not None and event.value == b"not read"


def test_a_golden_store_is_tiered_and_reads_as_before(store: hw.Store) -> None:
    before = [[(event.value, event.key, event.time, event.position) for event in store.stream(f"golden/{name}").read()] for name in _EVENTS]
    report = store.run_upkeep()
    assert report.problems == () and report.events_tiered > 0
    assert not any(info.key.endswith(".hwj") for info in store._engine.storage.list("journal/"))
    after = [[(event.value, event.key, event.time, event.position) for event in store.stream(f"golden/{name}").read()] for name in _EVENTS]
    assert after == before and check_store(store).ok


def test_a_golden_store_is_written_on(store: hw.Store) -> None:
    events = store.stream("golden/events")
    with events.writer("source") as writer:
        assert writer.last_number == 1000
        assert writer.write("again", number=1000).duplicate
        writer.write("new", key=1, number=1001)
    assert [event.value for event in events.read() if event.key == b"1"][-1] == b"new"
    typed = store.stream("golden/typed")
    with typed.writer() as rows:
        rows.write({"id": 4})
    assert [event.value["id"] for event in typed.read()] == [1, 2**40, 3, 4]
