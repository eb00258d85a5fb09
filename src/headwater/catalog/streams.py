"""Scopes and streams: names, policies, labels, schemas, and the life of a stream from creation to deletion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headwater.catalog import journals, keeps, tags, transactions
from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.schema import next_id
from headwater.catalog.segments import COLUMNS, SegmentRow, insert_segments, list_open_segments, to_row
from headwater.errors import ConflictError, NotFoundError, SealedError
from headwater.model.keys import WHOLE
from headwater.model.names import StreamName
from headwater.model.policies import Retention

#: The kind of a table whose entries are being filled: see fills.py.
FILLING = "filling"


@dataclass(frozen=True)
class StreamRow:
    """A stream as the catalog has it."""

    id: int
    scope: str
    name: str
    kind: str
    epoch: int
    schema_version: int
    scaling: str
    retention: str
    created_at: int
    sealed_at: int | None

    @property
    def full_name(self) -> str:
        return f"{self.scope}/{self.name}"


_COLUMNS = "id, scope, name, kind, epoch, schema_version, scaling, retention, created_at, sealed_at"
_WITH_SEGMENT = (
    f"SELECT s.{_COLUMNS.replace(', ', ', s.')}, g.{COLUMNS.replace(', ', ', g.')} "
    "FROM stream s LEFT JOIN segment g ON g.stream = s.id AND g.number = ? WHERE s.scope = ? AND s.name = ?"
)


@operation("commit")
def create_scope(tx: Tx, name: str) -> bool:
    """False if it was there."""
    return bool(tx.run("INSERT INTO scope (name, created_at) VALUES (?, now_us()) ON CONFLICT (name) DO NOTHING RETURNING name", (name,)))


def keep_scope(tx: Tx, name: str, *, alone: bool = False) -> None:
    """Make a scope if it is missing; in any case it stays until this transaction ends. `alone`: and gets no streams of others."""
    lock = "UPDATE" if alone else "SHARE"
    # Between the two statements another one may delete it.
    while not create_scope(tx, name) and not tx.run(f"SELECT 1 FROM scope WHERE name = ? FOR {lock}", (name,)):
        pass


@operation("commit", right=Right("manage", "name"))
def delete_scope(tx: Tx, name: str) -> None:
    if not tx.run("SELECT 1 FROM scope WHERE name = ? FOR UPDATE", (name,)):
        raise NotFoundError(f"there is no scope {name!r}")
    left = [row[0] for row in tx.run("SELECT name FROM stream WHERE scope = ? ORDER BY name LIMIT 4", (name,))]
    if left:
        raise ConflictError(f"scope {name!r} still has streams ({', '.join(left)}{', …' if len(left) > 3 else ''}): delete them first")
    tx.run("DELETE FROM scope WHERE name = ?", (name,))


@operation("statement")
def list_scopes(tx: Tx) -> list[str]:
    return [row[0] for row in tx.run("SELECT name FROM scope ORDER BY name")]


@operation("commit")
def create_stream(
    tx: Tx, name: StreamName, *, kind: str, segments: int, scaling: str, retention: str, schema: bytes, labels: Collection[str]
) -> StreamRow | None:
    """The new stream, with its first epoch's segments; None if the name is taken. Makes the scope if it is missing."""
    keep_scope(tx, name.scope)
    stream = next_id(tx, "stream")
    made = tx.run(
        "INSERT INTO stream (id, scope, name, kind, epoch, next_segment, schema_version, scaling, retention, created_at) "
        "VALUES (?, ?, ?, ?, 0, 0, 1, ?, ?, now_us()) ON CONFLICT (scope, name) DO NOTHING RETURNING created_at",
        (stream, name.scope, name.name, kind, scaling, retention),
    )
    if not made:
        return None
    tx.run("INSERT INTO stream_schema (stream, version, arrow) VALUES (?, 1, ?)", (stream, schema))
    _insert_labels(tx, stream, labels)
    insert_segments(tx, stream, epoch=0, made_at=made[0][0], ranges=WHOLE.split(segments))
    if kind == "journal":
        journals.insert_journal(tx, stream)
    return get_stream(tx, stream)


@operation("commit", repeatable=True)
def ensure_stream(
    tx: Tx, name: StreamName, *, kind: str, segments: int, scaling: str, retention: str, schema: bytes, labels: Collection[str]
) -> StreamRow | None:
    """Like `create_stream`, for a caller who takes an existing stream as well: it runs again after a lost answer."""
    return create_stream(tx, name, kind=kind, segments=segments, scaling=scaling, retention=retention, schema=schema, labels=labels)


def copy_stream(tx: Tx, parent: int, name: StreamName) -> StreamRow | None:
    """A new stream with its parent's kind, schemas and policies, without segments; None if the name is taken."""
    keep_scope(tx, name.scope)
    stream = next_id(tx, "stream")
    made = tx.run(
        "INSERT INTO stream (id, scope, name, kind, epoch, next_segment, schema_version, scaling, retention, created_at) "
        "SELECT ?, ?, ?, kind, epoch, 0, schema_version, scaling, retention, now_us() FROM stream WHERE id = ? "
        "ON CONFLICT (scope, name) DO NOTHING RETURNING id",
        (stream, name.scope, name.name, parent),
    )
    if not made:
        return None
    tx.run(
        "INSERT INTO stream_schema (stream, version, arrow) SELECT ?, version, arrow FROM stream_schema WHERE stream = ?", (stream, parent)
    )
    return get_stream(tx, stream)


@operation("statement", right=Right("read", "stream"))
def list_forks(tx: Tx, stream: int) -> list[str]:
    """Full names of the streams that read some of this one's logs."""
    rows = tx.run(
        "SELECT DISTINCT f.scope, f.name FROM segment s JOIN base b ON b.source = s.log JOIN segment v ON v.log = b.log "
        "JOIN stream f ON f.id = v.stream WHERE s.stream = ? AND f.kind <> ?",
        (stream, FILLING),
    )
    return sorted(f"{row[0]}/{row[1]}" for row in rows)


@operation("statement", right=Right("read", "stream"))
def find_origin(tx: Tx, stream: int) -> str | None:
    """The full name of the stream that this one was forked from, if it is still there."""
    rows = tx.run(
        "SELECT o.scope, o.name FROM segment v JOIN base b ON b.log = v.log JOIN segment s ON s.log = b.source "
        "JOIN stream o ON o.id = s.stream WHERE v.stream = ? ORDER BY o.id DESC LIMIT 1",
        (stream,),
    )
    return f"{rows[0][0]}/{rows[0][1]}" if rows else None


@operation("statement", right=Right("read", "name"))
def find_stream(tx: Tx, name: StreamName) -> StreamRow | None:
    rows = tx.run(*found(name))
    return StreamRow(*rows[0]) if rows else None


def get_named(tx: Tx, name: StreamName) -> StreamRow:
    """The stream of a name. NotFoundError if there is none."""
    row = find_stream(tx, name)
    if row is None:
        raise NotFoundError(f"there is no stream {name}")
    return row


def found(name: StreamName) -> Statement:
    """The statement that looks up the stream of a name; a `StreamRow` is made of its row."""
    return f"SELECT {_COLUMNS} FROM stream WHERE scope = ? AND name = ?", name


def with_segment(name: StreamName, number: int) -> Statement:
    """The statement whose row, if there is such a stream, `to_stream_and_segment` takes."""
    return _WITH_SEGMENT, (number, *name)


def to_stream_and_segment(row: Row) -> tuple[StreamRow, SegmentRow | None]:
    width = len(row) - COLUMNS.count(",") - 1
    stream, segment = row[:width], row[width:]
    return StreamRow(*stream), to_row(segment) if segment[0] is not None else None


def gone(stream: int) -> NotFoundError:
    """The error for a stream that was deleted. Its name went with it: whoever gave the id may know it."""
    return NotFoundError("this stream was deleted", stream=stream)


@operation("statement", right=Right("read", "stream"))
def get_stream(tx: Tx, stream: int) -> StreamRow:
    return to_stream(stream, tx.run(*looked_up(stream)))


def looked_up(stream: int) -> Statement:
    """The statement that looks up a stream, for `to_stream`."""
    return f"SELECT {_COLUMNS} FROM stream WHERE id = ?", (stream,)


def to_stream(stream: int, rows: Sequence[Row]) -> StreamRow:
    if not rows:
        raise gone(stream)
    return StreamRow(*rows[0])


@operation("read", right=Right("read", "stream"))
def get_with_open_segments(tx: Tx, stream: int) -> tuple[StreamRow, list[SegmentRow]]:
    return get_stream(tx, stream), list_open_segments(tx, stream)


def lock_stream(tx: Tx, stream: int) -> StreamRow:
    """The stream, unchanged until this transaction ends."""
    rows = tx.run(f"SELECT {_COLUMNS} FROM stream WHERE id = ? FOR UPDATE", (stream,))
    if not rows:
        raise gone(stream)
    return StreamRow(*rows[0])


@operation("statement")
def list_streams(tx: Tx, scope: str | None, label: str | None, kinds: Collection[str] = ("events", "bytes")) -> list[str]:
    """Full names, in order, of the streams of these kinds."""
    return [row.full_name for row in find_streams(tx, scope, label, kinds)]


def find_streams(tx: Tx, scope: str | None, label: str | None, kinds: Collection[str] = ("events", "bytes")) -> list[StreamRow]:
    """The streams of these kinds, in the order of their names."""
    sql, values = f"SELECT {_COLUMNS} FROM stream WHERE kind IN ({', '.join('?' * len(kinds))})", list(kinds)
    if label is not None:
        sql += " AND id IN (SELECT stream FROM stream_label WHERE label = ?)"
        values.append(label)
    if scope is not None:
        sql += " AND scope = ?"
        values.append(scope)
    return sorted([StreamRow(*row) for row in tx.run(sql, values)], key=lambda row: (row.scope, row.name))


@operation("statement", right=Right("read", "stream"))
def is_retained(tx: Tx, stream: int) -> bool:
    """Whether some of a stream may go by itself."""
    return bool(tx.run("SELECT 1 FROM stream WHERE id = ? AND retention <> ?", (stream, Retention.forever().to_json())))


@operation("statement")
def list_retained(tx: Tx) -> list[StreamRow]:
    """The streams that don't keep everything for ever."""
    rows = tx.run(f"SELECT {_COLUMNS} FROM stream WHERE retention <> ? ORDER BY id", (Retention.forever().to_json(),))
    return [StreamRow(*row) for row in rows]


@operation("statement", right=Right("read", "stream"))
def list_labels(tx: Tx, stream: int) -> tuple[str, ...]:
    return tuple(list_labels_of(tx, [stream])[stream])


def list_labels_of(tx: Tx, streams: Sequence[int]) -> dict[int, list[str]]:
    """The labels of several streams, in order."""
    found: dict[int, list[str]] = {stream: [] for stream in streams}
    marks = ", ".join("?" * len(streams))
    for stream, label in tx.run(f"SELECT stream, label FROM stream_label WHERE stream IN ({marks}) ORDER BY label", streams):
        found[stream].append(label)
    return found


def _insert_labels(tx: Tx, stream: int, labels: Collection[str]) -> None:
    tx.defer("INSERT INTO stream_label (label, stream) VALUES (?, ?)", [(label, stream) for label in sorted(set(labels))])


@operation("commit", repeatable=True)
def update_stream(tx: Tx, stream: int, *, scaling: str | None, retention: str | None, labels: Collection[str] | None) -> StreamRow:
    """Change what is not None."""
    row = lock_stream(tx, stream)
    if row.sealed_at is not None and scaling:
        raise SealedError(f"stream {row.full_name} is sealed")
    _update(tx, stream, scaling, retention, labels)
    return get_stream(tx, stream)


@operation("commit")
def evolve_stream(
    tx: Tx, stream: int, *, version: int, schema: bytes, scaling: str | None, retention: str | None, labels: Collection[str] | None
) -> StreamRow:
    """Give a stream a new schema, and change what else is not None. ConflictError unless its present schema is of this version."""
    row = lock_stream(tx, stream)
    if row.sealed_at is not None:
        raise SealedError(f"stream {row.full_name} is sealed")
    if row.schema_version != version:
        raise ConflictError(f"the schema of {row.full_name} was changed meanwhile: look again")
    _update(tx, stream, scaling, retention, labels)
    # Versions follow the clock, as ids do (`next_id`), in seconds: blocks have 32 bits for them.
    new = max(version + 1, tx.run("SELECT now_us()")[0][0] // 1_000_000 % (15 << 28))
    tx.run("INSERT INTO stream_schema (stream, version, arrow) VALUES (?, ?, ?)", (stream, new, schema))
    tx.run("UPDATE stream SET schema_version = ? WHERE id = ?", (new, stream))
    return get_stream(tx, stream)


def _update(tx: Tx, stream: int, scaling: str | None, retention: str | None, labels: Collection[str] | None) -> None:
    if scaling is not None:
        tx.run("UPDATE stream SET scaling = ? WHERE id = ?", (scaling, stream))
    if retention is not None:
        tx.run("UPDATE stream SET retention = ? WHERE id = ?", (retention, stream))
    if labels is not None:
        tx.run("DELETE FROM stream_label WHERE stream = ?", (stream,))
        _insert_labels(tx, stream, labels)


@operation("statement", right=Right("read", "stream"))
def get_schemas(tx: Tx, stream: int) -> dict[int, bytes]:
    """Every version of a stream's schema."""
    return {row[0]: bytes(row[1]) for row in tx.run("SELECT version, arrow FROM stream_schema WHERE stream = ?", (stream,))}


@operation("commit", repeatable=True, right=Right("manage", "stream"))
def seal_stream(tx: Tx, stream: int) -> None:
    """Close every open segment for good, and abort the open transactions that write to it. Sealing again changes nothing."""
    transactions.abort_staged_in(tx, stream)
    row = lock_stream(tx, stream)
    if row.sealed_at is not None:
        return
    tx.run("SELECT number FROM segment WHERE stream = ? AND sealed_epoch IS NULL ORDER BY number FOR UPDATE", (stream,))
    tx.run("UPDATE stream SET sealed_at = now_us() WHERE id = ?", (stream,))
    tx.run("UPDATE segment SET sealed_epoch = ?, sealed_at = now_us() WHERE stream = ? AND sealed_epoch IS NULL", (row.epoch + 1, stream))


@operation("commit", right=Right("manage", "name"))
def delete_by_name(tx: Tx, name: StreamName, *, seal: bool) -> int:
    """Delete a sealed stream; `seal` seals an open one in the same step. Returns its id."""
    row = get_named(tx, name)
    if seal:
        seal_stream(tx, row.id)
    delete_stream(tx, row.id)
    return row.id


_LOAD_TABLES = ("stream_load", "load_history", "scale_event")


def delete_stream(tx: Tx, stream: int) -> None:
    """Delete a sealed stream. Its extents go later, in slices."""
    row = lock_stream(tx, stream)
    if row.sealed_at is None:
        raise ConflictError(f"stream {row.full_name} is open: seal it before you delete it")
    tagged, kept = ([name for (name,) in rows] for rows in tx.run_all([tags.named_of(stream), keeps.named_of(stream)]))
    if tagged:
        raise ConflictError(f"stream {row.full_name} is kept by the tags {', '.join(tagged)}: untag them before you delete it")
    if kept:
        raise ConflictError(f"stream {row.full_name} is kept by the keeps {', '.join(kept)}: unkeep them before you delete it")
    tables = (
        "segment",
        "stream_label",
        "stream_schema",
        "writer",
        "entry",
        "noted_time",
        "watermark",
        "undone",
        "fork_point",
        "roll_back",
        *_LOAD_TABLES,
    )
    tx.run_all(
        [
            ("INSERT INTO dead_log (log) SELECT log FROM segment WHERE stream = ?", (stream,)),
            ("DELETE FROM base WHERE log IN (SELECT log FROM segment WHERE stream = ?)", (stream,)),
            *((f"DELETE FROM {table} WHERE stream = ?", (stream,)) for table in tables),
            ("DELETE FROM stream WHERE id = ?", (stream,)),
        ]
    )
    journals.bury_journal(tx, stream)
