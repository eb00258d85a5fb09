"""Replacing one stream by another under its name, in the commit of a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater.catalog import replacements, segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.parts import Ledger, Placed, Refusal, Refused, Term
from headwater.catalog.refusals import dump_error, load_error
from headwater.catalog.streams import StreamRow
from headwater.catalog.tails import Tails, Watch
from headwater.errors import AlreadyExistsError, ConflictError, HeadwaterError, InvalidRequestError
from headwater.model.cuts import Cut, StreamCut
from headwater.model.names import parse_stream_name
from headwater.model.segmentmap import SegmentMap
from headwater.runtime import failpoints

#: What becomes of the reader groups of the old stream: they read on from where the two streams part, or from the new one's tail.
REREAD, CONTINUE = "reread", "continue"


class Replacements(Ledger["Replace"]):
    """The streams that a commit replaces. All of them are locked before any segment."""

    def __init__(self, tails: Tails, terms: Sequence[Replace]) -> None:
        super().__init__(tails, terms)
        self._open: dict[int, list[int]] = {}

    def guards(self) -> Iterable[int]:
        return [stream for term in self.terms for stream in (term.stream, term.by)]

    def find(self, tx: Tx) -> None:
        self._open = {term.stream: segments.list_open_numbers(tx, term.stream) for term in self.terms}

    def watched(self) -> list[Watch]:
        return [Watch(stream, number, True) for stream, numbers in self._open.items() for number in numbers]

    def look(self, tx: Tx) -> None:
        self._errors: dict[Replace, HeadwaterError] = {}
        self._done: list[Replace] = []
        for term in self.terms:
            try:
                _check(tx, term)
            except HeadwaterError as error:
                self._errors[term] = error

    def refusal(self, terms: Sequence[Replace]) -> Refusal | None:
        for term in terms:
            if term in self._errors:
                return Refusal(term, "can't be replaced", dump_error(self._errors[term]))
        return None

    def change(self, placed: Sequence[Placed]) -> None:
        self._done += [term for term, *_ in placed]

    def enter(self, tx: Tx) -> None:
        for term in self._done:
            _replace(tx, term)


@dataclass(frozen=True, slots=True)
class Replace(Term):
    """The part gives the name of a stream to another one, and another name to the stream, which is sealed."""

    ledger = Replacements
    stream: int
    by: int
    name: str
    keep_as: str
    consumers: str
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        return load_error(refused.facts)


def _check(tx: Tx, term: Replace) -> None:
    old, new = streams.get_stream(tx, term.stream), streams.get_stream(tx, term.by)
    if old.full_name != term.name:
        raise ConflictError(f"another stream took the name {term.name} meanwhile: look again")
    if old.id == new.id:
        raise InvalidRequestError(f"{term.name} can't be replaced by itself")
    if old.kind != new.kind or old.kind == "revisioned":
        raise InvalidRequestError(
            f"{old.full_name} is of kind {old.kind!r}, {new.full_name} of kind {new.kind!r}: one can't take the other's place"
        )
    for row in (old, new):
        if tx.run("SELECT 1 FROM replacement WHERE stream = ?", (row.id,)):
            # One stream would have two successors, or be its own.
            raise ConflictError(f"{row.full_name} was replaced before, and is kept as it was: fork it, and take the fork")
    writers = [row[0] for row in tx.run("SELECT id FROM writer WHERE stream = ? ORDER BY id LIMIT 4", (old.id,))]
    if writers:
        names = ", ".join(writers)
        raise ConflictError(f"{old.full_name} has named writers ({names}), whose last numbers would be lost: it can't be replaced")
    if streams.find_stream(tx, parse_stream_name(term.keep_as)) is not None:
        raise AlreadyExistsError(f"stream {term.keep_as} exists: what is replaced is kept under a new name")
    both = "SELECT g.name FROM reader_group g JOIN group_stream a ON a.grp = g.id JOIN group_stream b ON b.grp = g.id "
    for (name,) in tx.run(f"{both} WHERE a.stream = ? AND b.stream = ? ORDER BY g.name", (old.id, new.id)):
        raise ConflictError(f"the reader group {name!r} reads both {old.full_name} and {new.full_name}: delete it first")
    groups = "SELECT id, name, end_cut FROM reader_group WHERE id IN (SELECT grp FROM group_stream WHERE stream = ?) ORDER BY id"
    for group, name, end in tx.run(groups, (old.id,)):
        if end is not None:
            raise ConflictError(f"the reader group {name!r} ends at a cut of {old.full_name}: delete it first")
        if term.consumers == CONTINUE:
            _check_read(tx, old, group, name)


def _check_read(tx: Tx, old: StreamRow, group: int, name: str) -> None:
    stream_map = SegmentMap(segments.list_segments(tx, old.id))
    if stream_map.passes(stream_map.tail(), _position(tx, group, old.id)):
        raise ConflictError(f"the reader group {name!r} has not read all of {old.full_name}: let it read on, or let it read again")


def _position(tx: Tx, group: int, stream: int) -> dict[int, int]:
    return dict(tx.run("SELECT segment, position FROM group_segment WHERE grp = ? AND stream = ?", (group, stream)))


def _replace(tx: Tx, term: Replace) -> None:
    name, kept = parse_stream_name(term.name), parse_stream_name(term.keep_as)
    streams.seal_stream(tx, term.stream)
    streams.keep_scope(tx, kept.scope)
    replacements.note(tx, term.stream, term.by)
    for stream, new_name in ((term.stream, kept), (term.by, name)):
        tx.run("UPDATE stream SET scope = ?, name = ? WHERE id = ?", (new_name.scope, new_name.name, stream))
    failpoints.reach("replace.renamed")
    _move_groups(tx, term)
    failpoints.reach("replace.applied")


def _move_groups(tx: Tx, term: Replace) -> None:
    """Let the reader groups of the old stream read the new one, from a place that holds there. Groups are locked last, by their ids."""
    tx.run("UPDATE group_stream SET name = ? WHERE stream = ?", (term.name, term.by))
    sql = "SELECT id FROM reader_group WHERE id IN (SELECT grp FROM group_stream WHERE stream = ?) ORDER BY id FOR UPDATE"
    groups = [row[0] for row in tx.run(sql, (term.stream,))]
    [(store,)] = tx.run("SELECT id FROM store")
    for group in groups:
        place = replacements.follow(tx, term.stream, term.by, _position(tx, group, term.stream))
        assert place is not None, "the replacement was noted"
        if term.consumers == CONTINUE:
            tail = SegmentMap(segments.list_segments(tx, term.by)).tail()
            place = replacements.Moved(tail, True)
        above = "CASE WHEN now_us() > generation THEN now_us() ELSE generation + 1 END"
        tx.run(f"UPDATE reader_group SET generation = {above} WHERE id = ?", (group,))
        if not place.holds:
            cut = Cut(store, {term.name: StreamCut(term.by, place.numbers)})
            tx.run("UPDATE reader_group SET rolled_generation = generation, rolled_to = ? WHERE id = ?", (str(cut), group))
        tx.run("UPDATE group_stream SET stream = ?, name = ? WHERE grp = ? AND stream = ?", (term.by, term.name, group, term.stream))
        tx.run("DELETE FROM group_segment WHERE grp = ? AND stream = ?", (group, term.stream))
        tx.defer(
            "INSERT INTO group_segment (grp, stream, segment, position, done, since) VALUES (?, ?, ?, ?, 0, now_us())",
            [(group, term.by, segment, at) for segment, at in place.numbers.items()],
        )
