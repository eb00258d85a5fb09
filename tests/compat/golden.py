"""What the golden files hold, and `python -m tests.compat.golden`, which writes the golden store of this catalog format anew."""

from __future__ import annotations

import tarfile
import tempfile
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import apsw
import pyarrow as pa

import headwater as hw
from headwater.catalog import schema
from headwater.model.schemas import OPAQUE, TIME
from headwater.segments.block import Chunk
from headwater.segments.encoding import encode

TIMES = [datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=UTC), None, datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)]
OPAQUE_EVENTS: list[tuple[bytes, bytes | None]] = [(b"first", b"key"), (b"", None), (b"\x00\xff", b"")]
FIRST_SCHEMA = pa.schema([pa.field("id", pa.int32(), nullable=False), ("price", pa.decimal128(9, 2))])
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("price", pa.decimal128(12, 2)),
        ("tags", pa.list_(pa.struct([("k", pa.string())]))),
        ("extra", pa.map_(pa.string(), pa.int64())),
    ]
)
TYPED: list[dict[str, Any]] = [
    {"id": 1, "price": Decimal("1.50"), "tags": None, "extra": None},
    {"id": 2**40, "price": None, "tags": [{"k": "a"}, {"k": None}], "extra": [("x", 1)]},
    {"id": 3, "price": Decimal("-0.01"), "tags": [], "extra": []},
]
LARGE = b"in the journal " * 4500
STORES = Path(__file__).parent / "stores"
MARKER = hw.Marker("golden", 7, "the input's hash")


def blocks() -> dict[str, bytes]:
    """One block of each kind."""
    keys = pa.array([key for _, key in OPAQUE_EVENTS], pa.binary())
    values = pa.RecordBatch.from_arrays([pa.array([value for value, _ in OPAQUE_EVENTS], pa.binary())], schema=OPAQUE)
    typed = pa.RecordBatch.from_pylist(TYPED, schema=SCHEMA)
    return {
        "opaque.hwb": encode([Chunk(values, keys, pa.array(TIMES, TIME))], 1, True).to_bytes(),
        "plain.hwb": encode([Chunk(values, None, None)], 1, True).to_bytes(),
        "typed.hwb": encode([Chunk(typed, keys, pa.array(TIMES, TIME))], 7, False).to_bytes(),
    }


def write_store(folder: Path) -> None:
    """A store with a bit of everything: what is in it, `test_golden.py` says."""
    with hw.open(folder, upkeep=False) as store:
        events = store.create_stream("golden/events", labels=["kept"])
        with events.writer("source") as writer:
            for number in range(10):
                writer.write(f"{number}", key=number % 3, time=TIMES[0] if number % 2 else None, number=number * 10 + 1)
            writer.flush()
            events.split(0)
            for number in range(10, 20):
                writer.write(f"{number}", key=number % 3, number=number * 10 + 1)
            writer.flush()
            events.merge([1, 2])
            store.run_upkeep()  # From here on in Parquet; what follows stays in blocks.
            writer.write(LARGE, key=0, number=1000)
        typed = store.create_stream("golden/typed", schema=FIRST_SCHEMA)
        with typed.writer() as writer:
            writer.write({"id": 1, "price": Decimal("1.50")}, key="a")
        store.run_upkeep()
        typed.update(schema=SCHEMA)
        with typed.writer() as writer:
            writer.write_batch(pa.RecordBatch.from_pylist(TYPED[1:], schema=SCHEMA), key="id")
        raw = store.create_stream("golden/bytes", kind="bytes")
        with raw.byte_writer() as bytes_writer:
            bytes_writer.write(b"0123456789")
        raw.seal()
        cut = store.create_stream("golden/truncated")
        with cut.writer() as writer:
            writer.write("gone")
            writer.flush()
            cut.truncate(cut.tail())
            writer.write("kept")
        events.fork("golden/fork")
        store.tag("golden", store.cut("golden/events", "golden/typed"))
        table = store.table("golden/table")
        table.put("kept", b"old")
        table.put("gone", b"")
        table.remove("gone")
        store.create_stream("golden/read")
        with store.transaction(marker=MARKER) as transaction:
            transaction.put("golden/table", "kept", b"new")
            for word in ("read", "not read"):
                transaction.write("golden/read", word)
        store.revisioned("golden/state").append("state")
        with store.reader_group("golden", ["golden/read"]).reader("reader") as reader:
            reader.read()


def write_archive(target: Path) -> None:
    """Write the store as one small archive: without the lock file, and without what SQLite leaves in free pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder / "store")
        (folder / "store" / "catalog.sqlite-lock").unlink()
        apsw.Connection(str(folder / "store" / "catalog.sqlite")).execute("VACUUM; PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with tarfile.open(target, "w:gz") as archive:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix not in (".sqlite-wal", ".sqlite-shm"):
                    archive.add(path, path.relative_to(folder), filter=_anonymous)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    write_archive(STORES / f"format-{schema.SCHEMA.format}.tar.gz")
