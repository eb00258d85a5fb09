"""A journal's events: as they are given, as they are stored in columns, and as they are read."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from json import JSONEncoder
from typing import Any, NamedTuple

import pyarrow as pa

from headwater.errors import InvalidRequestError
from headwater.model.arguments import check_whole, items_of, shown
from headwater.model.limits import ENTITY_ID_BYTES, EVENT_TAG_BYTES, EVENT_TAGS, EVENT_TYPE_BYTES, PERSIST_BYTES, PERSIST_EVENTS
from headwater.model.positions import Position

#: The columns of every journal. `data` and `meta` are JSON texts, so that Spark and DuckDB read them too.
JOURNAL_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("type", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("data", pa.string(), nullable=False),
        pa.field("tags", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
        pa.field("meta", pa.string()),
        pa.field("event_id", pa.string(), nullable=False),
    ]
)

#: An event's version is a number that a 32-bit integer holds.
_MOST_VERSION = (1 << 31) - 1
_WORD = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+").fullmatch
#: What a value that has no JSON text raises: another type, NaN, itself within it, or half of a surrogate pair.
_NO_JSON = (TypeError, ValueError, RecursionError)
_encode = JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_SCALARS = (str, int, float, bool, type(None))


class Record:
    """An event to be persisted: its type, its data and meta as JSON values, its tags, and the version of its type.

    `event_id` is a UUID. It is made here, so that the same records given again are recognised.
    """

    __slots__ = ("data", "event_id", "meta", "tags", "type", "version")

    def __init__(
        self,
        type: str,
        data: Any,
        *,
        version: int = 1,
        tags: Sequence[str] = (),
        meta: Any = None,
        event_id: uuid.UUID | str | None = None,
    ) -> None:
        self.type = type
        self.data = data
        self.version = version
        self.tags = tags
        self.meta = meta
        self.event_id: uuid.UUID | str = uuid.uuid4() if event_id is None else event_id

    def _fields(self) -> tuple[Any, ...]:
        return self.type, self.data, self.version, self.tags, self.meta, self.event_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self.event_id)

    def __repr__(self) -> str:
        fields = [f"{self.type!r}, {self.data!r}"]
        fields += [f"version={self.version!r}"] if self.version != 1 else []
        fields += [f"tags={self.tags!r}"] if self.tags else []
        fields += [f"meta={self.meta!r}"] if self.meta is not None else []
        return f"Record({', '.join(fields)}, event_id={str(self.event_id)!r})"


class Recorded(NamedTuple):
    """An event of a journal. `time` is when it was appended; `tags` are in the order in which they were given."""

    id: str
    sequence: int
    type: str
    version: int
    data: Any
    tags: tuple[str, ...]
    meta: Any
    event_id: uuid.UUID
    time: datetime
    position: Position


class Head(NamedTuple):
    """Where an entity is: its last sequence, the first one that replay gives, and the sequence of its last snapshot, if it has any.

    `low` is `sequence` + 1 if all events were deleted. An unknown id is at 0, 0, None.
    """

    sequence: int
    low: int
    snapshot: int | None


class Snapshot(NamedTuple):
    """An entity's state, a JSON value, as of a sequence. `version` is the one of the code that made it."""

    sequence: int
    state: Any
    version: int


class Row(NamedTuple):
    """An event that was checked, as it is stored."""

    type: str
    version: int
    data: str
    tags: tuple[str, ...]
    meta: str | None
    event_id: str


def check_id(id: Any, what: str = "an entity's id") -> str:
    """The id itself, if an entity can have it."""
    if isinstance(id, str) and id and "\0" not in id:
        # Four bytes is the most that a character has.
        size = len(id) if len(id) > ENTITY_ID_BYTES or id.isascii() else _size(id)
        if 0 < size <= ENTITY_ID_BYTES:
            return str.__str__(id)
    raise InvalidRequestError(f"{what} is text of 1 to {ENTITY_ID_BYTES} bytes of UTF-8 without NUL, not {shown(id)}")


def _size(text: str) -> int:
    """The bytes of a text in UTF-8; 0 if it has half of a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def check_tag(tag: Any) -> str:
    if isinstance(tag, str) and is_word(tag, EVENT_TAG_BYTES):
        return str.__str__(tag)
    raise InvalidRequestError(
        f"a tag is text of 1 to {EVENT_TAG_BYTES} bytes of UTF-8 without white space or control characters, not {shown(tag)}"
    )


def check_type(type: Any) -> str:
    if isinstance(type, str) and is_word(type, EVENT_TYPE_BYTES):
        return str.__str__(type)
    raise InvalidRequestError(
        f"an event's type is text of 1 to {EVENT_TYPE_BYTES} bytes of UTF-8 without white space or control characters, not {shown(type)}"
    )


@lru_cache(maxsize=4096)
def is_word(text: str, limit: int) -> bool:
    """Whether a text is a word of up to so many bytes."""
    return len(text) <= limit and 0 < _size(text) <= limit and _WORD(text) is not None


def check_records(events: Any) -> list[Row]:
    """One or a list of records as they are stored. InvalidRequestError, with the place of the record, if one can't be."""
    given = [events] if isinstance(events, Record) else list(items_of(events, "what is persisted", "hw.Record"))
    if not given:
        raise InvalidRequestError("a persist has at least one event: there is nothing to store")
    if len(given) > PERSIST_EVENTS:
        raise InvalidRequestError(f"a persist has up to {PERSIST_EVENTS:,} events, not {len(given):,}: split them over several")
    rows = []
    for place, record in enumerate(given):
        try:
            rows.append(_check_record(record))
        except InvalidRequestError as error:
            where = f"event {place} of this persist: " if len(given) > 1 else ""
            raise InvalidRequestError(f"{where}{error.message}") from error.__cause__
    if len(rows) > 1 and len({row.event_id for row in rows}) < len(rows):
        raise InvalidRequestError("two events of this persist have the same event_id: each event has its own")
    size = sum([row_bytes(row) for row in rows])
    if size > PERSIST_BYTES:
        raise InvalidRequestError(f"these events have {size:,} bytes; a persist may have {PERSIST_BYTES:,}")
    return rows


def row_bytes(row: Row) -> int:
    """What an event takes, about; of text that is not ASCII at least as much."""
    data = len(row.data) if row.data.isascii() else len(row.data.encode())
    meta = 0 if row.meta is None else len(row.meta.encode())
    return data + meta + sum(map(len, row.tags)) + len(row.type) + 64


def _check_record(record: Any) -> Row:
    if not isinstance(record, Record):
        raise InvalidRequestError(f"an event is made with hw.Record(type, data), not {shown(record)}")
    version = check_whole(record.version, "an event's version", 0, _MOST_VERSION)
    meta = None if record.meta is None else json_text(record.meta, "an event's meta")
    return Row(
        check_type(record.type),
        version,
        json_text(record.data, "an event's data"),
        check_tags(record.tags),
        meta,
        _id_text(record.event_id),
    )


def check_tags(tags: Any) -> tuple[str, ...]:
    """Tags in their order, doubles once."""
    if tags == ():
        return ()
    found = tuple(dict.fromkeys([check_tag(tag) for tag in items_of(tags, "tags", "words")]))
    if len(found) > EVENT_TAGS:
        raise InvalidRequestError(f"an event has up to {EVENT_TAGS} tags, not {len(found)}")
    return found


def _id_text(event_id: Any) -> str:
    if isinstance(event_id, uuid.UUID):
        return str(event_id)
    try:
        return str(uuid.UUID(event_id))
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequestError(f"an event's event_id is a UUID, not {shown(event_id)}") from None


def json_text(value: Any, what: str) -> str:
    """The JSON text of a value. InvalidRequestError if it has none, or if a key in it is no text, which JSON would make one quietly."""
    try:
        _check_keys(value)
        text = _encode(value)
        # Half of a surrogate pair is no UTF-8, and so no file or database takes it.
        return text if text.isascii() else text.encode().decode()
    except _NO_JSON as error:
        raise InvalidRequestError(f"{what} is a JSON value: {error}") from error


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {shown(key)} is no text")
            if type(item) not in _SCALARS:
                _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            if type(item) not in _SCALARS:
                _check_keys(item)


def values_of(id: str, first: int, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Checked events of one entity, from a sequence on, as the values of a typed stream."""
    return [
        {
            "id": id,
            "sequence": sequence,
            "type": row.type,
            "version": row.version,
            "data": row.data,
            "tags": row.tags,
            "meta": row.meta,
            "event_id": row.event_id,
        }
        for sequence, row in enumerate(rows, first)
    ]


def columns_of(id: str, first: int, rows: Sequence[Row]) -> pa.RecordBatch:
    """Checked events of one entity, from a sequence on, as columns."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array([id] * len(rows), pa.string()),
            pa.array(range(first, first + len(rows)), pa.int64()),
            pa.array([row.type for row in rows], pa.string()),
            pa.array([row.version for row in rows], pa.int64()),
            pa.array([row.data for row in rows], pa.string()),
            pa.array([row.tags for row in rows], JOURNAL_SCHEMA.field("tags").type),
            pa.array([row.meta for row in rows], pa.string()),
            pa.array([row.event_id for row in rows], pa.string()),
        ],
        schema=JOURNAL_SCHEMA,
    )
