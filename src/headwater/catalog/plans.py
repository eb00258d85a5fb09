"""Plans: how parts are committed, whatever the receipt of their commit is.

A plan locks all segments in one pass and looks up what its terms need; then it decides part by part, each seeing what the parts before
it changed, and enters blocks, tails and changes. Nothing is decided by a look that came before the locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.catalog import claims, tails
from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.parts import REWOUND, SEALED, Append, Ledger, Part, PartResult, Placed, Refused, Stored, Term
from headwater.catalog.tails import Tail, Tails, Watch

#: Of values, so that one statement moves many on PostgreSQL.
_MOVE_TAILS = (
    "UPDATE segment SET tail = moved.column1, bytes = bytes + moved.column2, appended_at = moved.column3 "
    "FROM (VALUES (?, ?, ?, ?, ?)) AS moved WHERE stream = moved.column4 AND number = moved.column5"
)
#: A block with its log, its first number there, and when it was appended.
_PlacedBlock = tuple[int, int, int, Append]
_TermsByLedger = list[tuple[Ledger[Any], list[Term]]]


class Plan:
    """Parts on their way into the catalog. Give `tails` if the segments are locked already, and maybe others than the appends name."""

    def __init__(self, parts: Sequence[Part], tails: Tails | None = None) -> None:
        self.parts = parts
        self.tails: Tails = {} if tails is None else tails
        terms: dict[type[Ledger[Any]], list[Term]] = {}
        for part in parts:
            for term in part.terms:
                terms.setdefault(term.ledger, []).append(term)
        # In one order everywhere, since some of them lock rows.
        self._ledgers = {kind: kind(self.tails, terms[kind]) for kind in sorted(terms, key=lambda kind: kind.__name__)}
        #: The terms of each part, by the ledger that decides about them.
        self._terms = [self._by_ledger(part.terms) for part in parts]
        #: The number of statements of each ledger.
        self._looks: list[int] = []
        self._blocks: list[_PlacedBlock] = []
        self._grown: dict[tuple[int, int], Tail] = {}

    def find(self, tx: Tx) -> None:
        """Look up what to watch, if that is not as it was when the terms were given."""
        guards = sorted({stream for ledger in self._ledgers.values() for stream in ledger.guards()})
        if guards:
            marks = ", ".join("?" * len(guards))
            tx.run(f"SELECT id FROM stream WHERE id IN ({marks}) ORDER BY id FOR UPDATE", guards)
        for ledger in self._ledgers.values():
            ledger.find(tx)

    def watched(self) -> list[Watch]:
        """All segments to lock."""
        found = [Watch(append.stream, append.segment, True) for part in self.parts for append in part.appends]
        for ledger in self._ledgers.values():
            found += ledger.watched()
        return found

    def locks(self) -> list[Statement]:
        """The statements that lock all segments; `load_tails` takes their answers."""
        return tails.lock(self.watched())

    def load_tails(self, answers: Sequence[list[Row]]) -> None:
        self.tails.update(tails.load(answers))

    def looks(self) -> list[Statement]:
        """The statements that lock and look up what the terms need, to be run behind the locks; `load_looks` takes their answers."""
        looks = [ledger.statements() for ledger in self._ledgers.values()]
        self._looks = [len(statements) for statements in looks]
        return [statement for statements in looks for statement in statements]

    def load_looks(self, tx: Tx, answers: Sequence[list[Row]]) -> None:
        at = 0
        for ledger, count in zip(self._ledgers.values(), self._looks, strict=True):
            ledger.load(list(answers[at : at + count]))
            at += count
        for ledger in self._ledgers.values():
            ledger.look(tx)

    def decide(self, tx: Tx, now: int) -> list[PartResult]:
        """Commit or refuse each part, in order."""
        results: list[PartResult] = []
        for part, terms in zip(self.parts, self._terms, strict=True):
            refused = self._refusal(part, terms)
            results.append(self._commit(tx, part, terms, now) if refused is None else refused)
        return results

    def _by_ledger(self, terms: Sequence[Term]) -> _TermsByLedger:
        found: dict[type[Ledger[Any]], list[Term]] = {}
        for term in terms:
            found.setdefault(term.ledger, []).append(term)
        return [(self._ledgers[kind], some) for kind, some in found.items()]

    def _refusal(self, part: Part, by_ledger: _TermsByLedger) -> Refused | None:
        for ledger, terms in by_ledger:
            refusal = ledger.refusal(terms)
            if refusal is not None:
                place = next(place for place, term in enumerate(part.terms) if term is refusal.term)
                return Refused(refusal.reason, refusal.facts, place)
        for append in part.appends:
            tail = self.tails.get((append.stream, append.segment))
            # A segment's row goes with its stream, or when it was sealed and truncated away: looking again tells which.
            if tail is None or not tail.is_open or append.log not in (0, tail.log):
                return Refused(SEALED, {})
        keys = [(append.stream, append.segment) for append in part.appends]
        if part.staged is not None:
            keys += part.staged.segments
        guarded = {stream for ledger, _ in by_ledger for stream in ledger.guards()}
        if guarded and not guarded.isdisjoint(stream for stream, _ in keys):
            return Refused(REWOUND, {})
        return claims.find_refusal([self.tails[key].claim for key in keys], part.terms)

    def _commit(self, tx: Tx, part: Part, by_ledger: _TermsByLedger, now: int) -> Stored:
        staged: list[tuple[int, int, int]] = []
        if part.staged is not None:
            staged = part.staged.place(tx, self.tails, now)
            self._grown.update(
                {(stream, self.tails[stream, segment].number): self.tails[stream, segment] for stream, segment in part.staged.segments}
            )
        targets = [self.tails[append.stream, append.segment] for append in part.appends]
        at = max([now, *(tail.appended_at for tail in targets)])
        placed = list(staged)
        for append, tail in zip(part.appends, targets, strict=True):
            appended_at = tail.append_time(at)
            first = tail.grow(append.count, append.length, appended_at)
            self._blocks.append((tail.log, first, appended_at, append))
            self._grown[append.stream, tail.number] = tail
            placed.append((append.stream, tail.number, first))
        answer: Any = None
        for ledger, terms in by_ledger:
            found = ledger.change([Placed(term, *(placed[term.block] if term.block >= 0 else _NOWHERE)) for term in terms])
            answer = answer if found is None else found
        return Stored(tuple([first for _, _, first in placed[len(staged) :]]), at, answer)

    def enter(self, tx: Tx) -> None:
        """Write what was decided."""
        tx.defer(_MOVE_TAILS, [(tail.tail, tail.bytes, tail.appended_at, *key) for key, tail in self._grown.items()])
        for tail in self._grown.values():
            tail.bytes = 0  # Transactions that share a roll share the segment.
        enter_blocks(tx, self._blocks)
        for ledger in self._ledgers.values():
            ledger.enter(tx)


_NOWHERE = (-1, -1, 0)


def enter_blocks(tx: Tx, blocks: Sequence[_PlacedBlock]) -> None:
    """Put blocks at their places, which are at the tails that the caller holds, and moves."""
    tx.defer(
        "INSERT INTO extent (log, first, count, length, crc, appended_at, object, position) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [(log, first, b.count, b.length, b.crc, appended_at, b.object, b.position) for log, first, appended_at, b in blocks],
    )
    inline = [(log, first, block.data) for log, first, _, block in blocks if block.data is not None]
    tx.defer("INSERT INTO inline_block (log, first, data) VALUES (?, ?, ?)", inline)
