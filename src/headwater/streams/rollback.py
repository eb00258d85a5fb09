"""Rolling streams back, in the commit of a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headwater.catalog import journals, rebuilds, rollbacks, segments, streams, transactions
from headwater.catalog.database import Tx
from headwater.catalog.parts import Ledger, Placed, Refusal, Refused, Term
from headwater.catalog.refusals import dump_error, load_error
from headwater.catalog.rollbacks import Parted
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import StreamRow
from headwater.catalog.tails import Tails, Watch
from headwater.errors import AlreadyExistsError, HeadwaterError, InvalidRequestError, SealedError
from headwater.model.cuts import Cut
from headwater.model.names import parse_stream_name
from headwater.streams import cuts
from headwater.streams.lifecycle import SCALED_KINDS, bare_ref


class _Decided(NamedTuple):
    """A roll-back that may be done: the stream, its segments, the cut, and what lies on which side of it."""

    stream: StreamRow
    rows: Sequence[SegmentRow]
    numbers: dict[int, int]
    parted: Parted


class RollBacks(Ledger["RollBack"]):
    """The streams that a commit rolls back. They are locked before all segments, so their open segments stay what they are."""

    def __init__(self, tails: Tails, terms: Sequence[RollBack]) -> None:
        super().__init__(tails, terms)
        self._open: dict[int, list[int]] = {}

    def guards(self) -> Iterable[int]:
        return [term.stream for term in self.terms]

    def find(self, tx: Tx) -> None:
        self._open = {term.stream: segments.list_open_numbers(tx, term.stream) for term in self.terms}

    def watched(self) -> list[Watch]:
        return [Watch(stream, number, True) for stream, numbers in self._open.items() for number in numbers]

    def look(self, tx: Tx) -> None:
        self._errors: dict[RollBack, HeadwaterError] = {}
        self._decided: dict[RollBack, _Decided] = {}
        self._done: list[RollBack] = []
        for term in self.terms:
            try:
                self._decided[term] = _decide(tx, term)
            except HeadwaterError as error:
                self._errors[term] = error

    def refusal(self, terms: Sequence[RollBack]) -> Refusal | None:
        for term in terms:
            if term in self._errors:
                return Refusal(term, "can't be rolled back", dump_error(self._errors[term]))
        return None

    def change(self, placed: Sequence[Placed]) -> None:
        self._done += [term for term, *_ in placed]

    def enter(self, tx: Tx) -> None:
        for term in self._done:
            _roll_back(tx, term, self._decided[term])


@dataclass(frozen=True, slots=True)
class RollBack(Term):
    """The part rolls a stream back to a cut, and keeps what it was under a new name. `transaction` is the one that does it."""

    ledger = RollBacks
    stream: int
    cut: str
    keep_as: str
    force: bool
    transaction: str
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        return load_error(refused.facts)


def _decide(tx: Tx, term: RollBack) -> _Decided:
    """What a roll-back does. Raises why it can't be done; changes nothing."""
    stream = streams.get_stream(tx, term.stream)
    check_kind(stream.full_name, stream.kind)
    if stream.sealed_at is not None:
        raise SealedError(f"stream {stream.full_name} is sealed: a fork of it at the cut has what is wanted")
    if tx.run("SELECT 1 FROM txn_extent WHERE txn = ? AND stream = ? LIMIT 1", (term.transaction, stream.id)):
        raise InvalidRequestError(f"this transaction writes to {stream.full_name} and rolls it back: do that in two")
    rows = segments.list_segments(tx, stream.id)
    if not term.force and not any(row.claim is not None and row.is_open for row in rows):
        raise InvalidRequestError(
            f"rolling {stream.full_name} back takes events from everybody who reads it: claim the stream first, or give force=True"
        )
    [[store]] = tx.run("SELECT id FROM store")
    ref = bare_ref(stream)
    numbers = cuts.resolve_cut(tx, store, ref, rows, Cut.parse(term.cut))
    cuts.check_readable(store, ref, rows, numbers)
    if streams.find_stream(tx, parse_stream_name(term.keep_as)) is not None:
        raise AlreadyExistsError(f"stream {term.keep_as} exists: what is rolled back is kept under a new name")
    parted = rollbacks.part(stream, rows, numbers)
    rollbacks.check_free(tx, stream, rows, numbers, parted)
    return _Decided(stream, rows, numbers, parted)


def _roll_back(tx: Tx, term: RollBack, decided: _Decided) -> None:
    stream = decided.stream
    name = parse_stream_name(term.keep_as)
    kept = streams.copy_stream(tx, stream.id, name)
    if kept is None:
        raise AlreadyExistsError(f"stream {name} exists: what is rolled back is kept under a new name")
    rollbacks.roll_back(tx, stream, kept, decided.rows, decided.numbers, decided.parted)
    if stream.kind == "journal":
        journals.insert_journal(tx, kept.id)
        rebuilds.begin_fork(tx, stream.id, kept.id)
        rebuilds.begin(tx, stream.id, "deleted")
    transactions.abort_staged_in(tx, stream.id, "a stream it writes to was rolled back")
    rollbacks.move_groups(tx, stream, decided.rows, decided.numbers, decided.parted)


def check_kind(name: str, kind: str) -> None:
    """Refuse a stream of which only one segment is ever read."""
    if kind == "table":
        raise InvalidRequestError(f"{name} is a table: store.table({name!r}).roll_back(version) is for that")
    if kind not in SCALED_KINDS:
        what = "a revisioned stream" if kind == "revisioned" else "a stream of bytes"
        raise InvalidRequestError(f"{name} is {what}: it can't be rolled back; fork it at the cut")
