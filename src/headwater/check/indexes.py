"""Whether the index of a journal says what its events say: where the events of each entity and of each tag are, and how many of each type.

Both sides are read once, in slices, and summed up by hashes: an event counts in one of a few hundred sums. Where two sums differ, the
entries of that sum are read again and compared. Works beside persists: what lies past the tails of the first look does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from headwater.catalog import segments
from headwater.catalog.database import Database, Row, Tx
from headwater.check.report import Problem
from headwater.errors import HeadwaterError
from headwater.model.cuts import Cut, StreamCut
from headwater.model.numbers import parse
from headwater.segments.batches import Columns
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, reading

_SUMS = 256
_SHOWN = 5
_SLICE_ROWS = 500
_MASK = (1 << 64) - 1


class Entry(NamedTuple):
    """An event of an entity or with a tag, as the stream or the index has it. Of a tag there is no sequence."""

    word: str
    sequence: int
    segment: int
    number: int


class _Look(NamedTuple):
    """One consistent look: which build the index is, the tails, and the rows of types."""

    build: int
    tails: dict[int, int]
    cut: dict[int, int]
    types: dict[tuple[str, int], tuple[int, int]]


def find_index_faults(engine: Engine, stream: StreamRef) -> list[str]:
    """What is wrong with a journal's index, the first few faults of each kind; none while it is rebuilt.

    Raises the errors of reading the events.
    """
    look = _look(engine.database, stream.id)
    if isinstance(look, str):
        return [look] if look else []
    try:
        check = _Check(engine, stream, look)
        found = check.run()
    except HeadwaterError:
        if _is_other(engine.database, stream.id, look):
            return []
        raise
    return [] if found and _is_other(engine.database, stream.id, look) else found


def _look(database: Database, stream: int) -> _Look | str:
    """The look, or what is wrong with the index as a whole; "" if it is rebuilt, or its stream is gone."""

    def read(tx: Tx) -> _Look | str:
        rows = segments.list_segments(tx, stream)
        state = tx.run("SELECT state, builds FROM journal WHERE stream = ?", (stream,))
        if not rows or (state and state[0][0] != "ready"):
            return ""
        if not state:
            return "it has no index"
        types = tx.run("SELECT word, segment, count, number FROM word WHERE stream = ? AND kind = 1", (stream,))
        return _Look(
            state[0][1],
            {row.number: row.tail for row in rows},
            _tail(rows),
            {(word, segment): (count, number) for word, segment, count, number in types},
        )

    return database.read(read)


def _tail(rows: list[segments.SegmentRow]) -> dict[int, int]:
    """The tails of the newest segments over each key, found without the map of segments, which this checks."""
    return {row.number: row.tail for row in rows if not any(other.number > row.number and other.keys.overlaps(row.keys) for other in rows)}


def _is_other(database: Database, stream: int, look: _Look) -> bool:
    """Whether a rebuild was begun since, or the stream deleted: then what was read does not fit together."""
    return database.query("SELECT state, builds FROM journal WHERE stream = ?", (stream,)) != [("ready", look.build)]


class _Check:
    def __init__(self, engine: Engine, stream: StreamRef, look: _Look) -> None:
        self._engine = engine
        self._stream = stream
        self._look = look
        self._faults: list[str] = []

    def run(self) -> list[str]:
        entities, tags = [0] * _SUMS, [0] * _SUMS
        types: dict[tuple[str, int], tuple[int, int]] = {}
        for entry, type, words in self._scan():
            _count(entities, entry)
            key = type, entry.segment
            types[key] = types.get(key, (0, 0))[0] + 1, entry.number
            for word in words:
                _count(tags, Entry(word, 0, entry.segment, entry.number))
        for sums, listed in ((entities, self._list_entities), (tags, self._list_tags)):
            indexed = [0] * _SUMS
            for entry in self._before(listed(self._faults)):
                _count(indexed, entry)
            wrong = {place for place in range(_SUMS) if sums[place] != indexed[place]}
            if wrong:
                # The entries of one sum fit into memory.
                self._compare(min(wrong), is_tag=sums is tags)
        for (type, segment), found in sorted(types.items() ^ self._look.types.items())[:_SHOWN]:
            there = types.get((type, segment), (0, None))
            if found == there or (type, segment) not in types:
                said = self._look.types.get((type, segment), (0, None))
                self._faults.append(
                    f"segment {segment} has {there[0]} events of the type {type!r}, the last one is {there[1]}; "
                    f"the index has {said[0]}, and {said[1]}"
                )
        return self._faults

    def _scan(self) -> Iterator[tuple[Entry, str, Sequence[str]]]:
        names = ["id", "sequence", "type", "tags"]
        end = Cut(self._engine.store_id, {self._stream.name: StreamCut(self._stream.id, self._look.cut)})
        ranges = cuts.ranges(self._engine, self._stream, None, end)
        for batch in reading.read_batches(self._engine, self._stream, ranges, names):
            columns = [column.to_pylist() for column in batch.to_arrow(Columns(names)).columns]
            for number, (id, sequence, type, words) in enumerate(zip(*columns, strict=True), batch.first):
                yield Entry(id, sequence, batch.segment, number), type, words

    def _before(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """Without what was persisted since the look."""
        tails, newest = self._look.tails, max(self._look.tails)
        return (entry for entry in entries if entry.segment <= newest and entry.number < tails.get(entry.segment, 1 << 62))

    def _compare(self, place: int, *, is_tag: bool) -> None:
        """Name the entries of one sum that only one side has."""
        if is_tag:
            events = {
                Entry(word, 0, entry.segment, entry.number) for entry, _, words in self._scan() for word in words if _sum_of(word) == place
            }
            index = self._list_tags([])
        else:
            events = {entry for entry, _, _ in self._scan() if _sum_of(entry.word) == place}
            index = self._list_entities([])
        entries = [entry for entry in self._before(index) if _sum_of(entry.word) == place]
        missing, wrong = events.difference(entries), set(entries) - events
        doubled = len(entries) - len(set(entries))
        for text, found in (("lacks", missing), ("has", wrong)):
            for entry in islice(sorted(found), _SHOWN):
                what = f"an event with the tag {entry.word!r}" if is_tag else f"event {entry.sequence} of {entry.word!r}"
                where = "which is there" if found is missing else "which is not there"
                self._faults.append(f"the index {text} {what} at event {entry.number} of segment {entry.segment}, {where}")
        if doubled and not missing and not wrong:
            self._faults.append(f"the index has {doubled} events twice")

    # The index.

    def _list_entities(self, faults: list[str]) -> Iterator[Entry]:
        columns = "id, sequence, low, segment, number, paged, recent"
        for rows in self._slices(f"SELECT {columns} FROM entity WHERE stream = ?", ("id",), 1):
            last = rows[-1][0]
            pages = self._pages("SELECT id, first, numbers FROM entity_page WHERE stream = ?", ("id", "first"), (rows[0][0], -1), last)
            page = next(pages, None)
            for id, sequence, low, segment, number, paged, recent in rows:
                entry = None
                while page is not None and page[0] <= id:
                    for entry in _entries(id, page[1], page[2]) if page[0] == id and page[1] <= paged else ():
                        yield entry
                    page = next(pages, None)
                for entry in _entries(id, paged + 1, recent):
                    yield entry
                if len(faults) < _SHOWN:
                    if entry is not None and entry != (id, sequence, segment, number) and sequence >= low:
                        faults.append(f"the index says that {id!r} is at sequence {sequence}, and has no such event")
                    if not 1 <= low <= sequence + 1:
                        faults.append(f"the index says that {id!r} is at sequence {sequence}, and that its first event is {low}")

    def _list_tags(self, faults: list[str]) -> Iterator[Entry]:
        columns = "word, segment, number, count, recent"
        for rows in self._slices(f"SELECT {columns} FROM word WHERE stream = ? AND kind = 0", ("word", "segment"), 2):
            sql = "SELECT word, segment, first, numbers FROM word_page WHERE stream = ?"
            pages = self._pages(sql, ("word", "segment", "first"), (*rows[0][:2], -1), rows[-1][0])
            page = next(pages, None)
            for word, segment, number, count, recent in rows:
                first = next((run.first for run in parse(recent)), 1 << 62)
                found, last = 0, -1
                while page is not None and page[:2] <= (word, segment):
                    if page[:2] == (word, segment) and page[2] < first:
                        for entry in _entries(word, 0, page[3], is_tag=True):
                            found, last = found + 1, entry.number
                            yield entry
                    page = next(pages, None)
                for entry in _entries(word, 0, recent, is_tag=True):
                    found, last = found + 1, entry.number
                    yield entry
                if (found, last) != (count, number) and len(faults) < _SHOWN:
                    faults.append(
                        f"the index says that the tag {word!r} has {count} events in segment {segment}, the last one {number}, "
                        f"and lists {found}, the last one {last}"
                    )

    def _slices(
        self, sql: str, key: tuple[str, ...], width: int, after: tuple[Any, ...] = (), until: str | None = None
    ) -> Iterator[list[Row]]:
        """The rows of a table by its key, in slices, each of which is one look."""
        order = ", ".join(key)
        marks = ", ".join("?" * len(key))
        while True:
            where = ""
            values: list[Any] = [self._stream.id]
            if after:
                where, values = f" AND ({order}) > ({marks})", [*values, *after]
            if until is not None:
                where, values = f"{where} AND {key[0]} <= ?", [*values, until]
            rows = self._engine.database.query(f"{sql}{where} ORDER BY {order} LIMIT ?", (*values, _SLICE_ROWS))
            if not rows:
                return
            yield rows
            after = rows[-1][:width]

    def _pages(self, sql: str, key: tuple[str, ...], after: tuple[Any, ...], until: str) -> Iterator[Row]:
        for rows in self._slices(sql, key, len(key), after, until):
            yield from rows


def _entries(word: str, sequence: int, text: str, *, is_tag: bool = False) -> Iterator[Entry]:
    for run in parse(text):
        for number in range(run.first, run.end):
            yield Entry(word, 0 if is_tag else sequence, run.segment, number)
            sequence += 1


def _sum_of(word: str) -> int:
    return hash(word) % _SUMS


def _count(sums: list[int], entry: Entry) -> None:
    place = _sum_of(entry.word)
    sums[place] = (sums[place] + hash(tuple(entry))) & _MASK


def find_lost_rows(database: Database) -> Iterator[Problem]:
    """Rows of indexes whose journal is not there, and indexes whose stream is not."""
    sql = "SELECT j.stream FROM journal j WHERE j.state <> 'dead' AND NOT EXISTS (SELECT 1 FROM stream s WHERE s.id = j.stream) LIMIT ?"
    for (stream,) in database.query(sql, (_SHOWN,)):
        yield Problem("dangling", f"the catalog has the index of the journal {stream}, which does not exist")
    for table in ("entity", "entity_page", "word", "word_page", "snapshot"):
        stream = -(1 << 62)
        # Each step leaps over one stream by the index.
        while rows := database.query(f"SELECT stream FROM {table} WHERE stream > ? ORDER BY stream LIMIT 1", (stream,)):
            stream = rows[0][0]
            if not database.query("SELECT 1 FROM journal WHERE stream = ?", (abs(stream),)):
                yield Problem("dangling", f"the catalog has rows of {table} of the journal {stream}, which does not exist")
