"""Reader positions that a transaction commits together with what it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.catalog import groups
from headwater.catalog.database import Tx
from headwater.catalog.parts import Ledger, Placed, Refusal, Refused, Term
from headwater.catalog.refusals import dump_error, load_error
from headwater.errors import ConflictError, HeadwaterError

#: From where to where a transaction moves a reader, by stream and segment.
Moves = dict[tuple[int, int], tuple[int, int]]


class Positions(Ledger["ReaderMove"]):
    """The positions of reader groups. Their rows are locked last, group by group."""

    def look(self, tx: Tx) -> None:
        self._rows: dict[int, groups.GroupRow] = {}
        self._refusals = {term: self._check(tx, term) for term in sorted(self.terms, key=lambda term: term.group)}
        self._moved: list[ReaderMove] = []

    def _check(self, tx: Tx, term: ReaderMove) -> HeadwaterError | None:
        try:
            row = self._rows[term.group] = self._rows.get(term.group) or groups.lock_group(tx, term.group)
            moves = load_moves(term.data)
            positions = {key: number for key, (_, number) in moves.items()}
            frontier = groups.check_holder(tx, row, term.reader, term.generation, term.group_generation, positions)
            for key, (start, _) in moves.items():
                at = frontier[key].position
                if at != start:
                    raise ConflictError(
                        f"the reader {term.reader!r} of group {row.name!r} is at {at} in segment {key[1]}, and this transaction "
                        f"goes on from {start}: one before it was not committed, or another for the same events was; read on from there"
                    )
        except HeadwaterError as error:
            return error
        return None

    def refusal(self, terms: Sequence[ReaderMove]) -> Refusal | None:
        for term in terms:
            error = self._refusals[term]
            if error is not None:
                return Refusal(term, "position", dump_error(error))
        return None

    def change(self, placed: Sequence[Placed]) -> None:
        self._moved += [term for term, *_ in placed]

    def enter(self, tx: Tx) -> None:
        for term in self._moved:
            groups.store_positions(tx, self._rows[term.group], {key: number for key, (_, number) in load_moves(term.data).items()})


@dataclass(frozen=True, slots=True)
class ReaderMove(Term):
    """The part commits if a reader still holds what it read, and is where the moves begin; its positions become where they end."""

    ledger = Positions
    group: int
    reader: str
    generation: int
    group_generation: int
    data: bytes
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        return load_error(refused.facts)


def dump_moves(moves: Moves) -> bytes:
    return json.dumps([[*key, *move] for key, move in sorted(moves.items())]).encode()


def load_moves(data: bytes) -> Moves:
    return {(stream, segment): (start, end) for stream, segment, start, end in json.loads(data)}
