"""Named writers: the last source number stored for each, and the generation that tells its present holder from older ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.operations import operation
from headwater.catalog.parts import Ledger, Placed, Refusal, Refused, Term
from headwater.catalog.schema import later
from headwater.catalog.streams import lock_stream
from headwater.errors import FencedError, HeadwaterError


@operation("commit", repeatable=True)
def open_writer(tx: Tx, stream: int, writer: str) -> tuple[int, int]:
    """(generation, last number) for a new holder of this id. Older holders are fenced from here on."""
    lock_stream(tx, stream)
    # Generations follow the clock, as ids do (`next_id`): none is given twice by a catalog that forgot its last commits.
    rows = tx.run(
        "INSERT INTO writer (stream, id, last_number, generation) VALUES (?, ?, 0, now_us()) ON CONFLICT (stream, id) DO UPDATE "
        f"SET generation = {later('writer', 'generation')} RETURNING generation, last_number",
        (stream, writer),
    )
    return rows[0][0], rows[0][1]


def list_writers(tx: Tx, stream: int) -> list[tuple[str, int]]:
    """(id, last number) of each named writer."""
    return [(row[0], row[1]) for row in tx.run("SELECT id, last_number FROM writer WHERE stream = ? ORDER BY id", (stream,))]


class WriterNumbers(Ledger["WriterIs"]):
    """The last number stored of each writer that parts are of."""

    def statements(self) -> list[Statement]:
        return [("SELECT last_number, generation FROM writer WHERE stream = ? AND id = ? FOR UPDATE", key) for key in self._keys()]

    def _keys(self) -> list[tuple[int, str]]:
        return sorted({(term.stream, term.writer) for term in self.terms})

    def load(self, answers: list[list[Row]]) -> None:
        self._rows: dict[tuple[int, str], Row] = {key: rows[0] for key, rows in zip(self._keys(), answers, strict=True) if rows}
        self._numbers: dict[tuple[int, str], int] = {}

    def refusal(self, terms: Sequence[WriterIs]) -> Refusal | None:
        for term in terms:
            row = self._rows.get((term.stream, term.writer))
            if row is None:
                return Refusal(term, "deleted", {})
            if row[1] != term.generation:
                return Refusal(term, "fenced", {"generation": row[1]})
            number: int = self._numbers.get((term.stream, term.writer), int(row[0]))
            if number < term.stored:
                # By a catalog that went back in time. What is missing now its source can still give, to one that begins anew.
                return Refusal(term, "forgotten", {"number": number})
            if number > term.stored:
                return Refusal(term, "passed", {"number": number})
        return None

    def change(self, placed: Sequence[Placed]) -> None:
        for term, *_ in placed:
            self._numbers[term.stream, term.writer] = term.last

    def enter(self, tx: Tx) -> None:
        tx.defer("UPDATE writer SET last_number = ? WHERE stream = ? AND id = ?", [(number, *key) for key, number in self._numbers.items()])


@dataclass(frozen=True, slots=True)
class WriterIs(Term):
    """The part commits if a named writer is still held, and its last number is the one that its holder knows; it becomes `last`."""

    ledger = WriterNumbers
    stream: int
    writer: str
    generation: int
    stored: int
    last: int
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        return FencedError(f"the writer {self.writer!r} can't store its events ({refused.reason}): open it again")
