"""Conditions on a stream itself: where its tail is, and that a version of its schema is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.catalog.database import Row, Statement
from headwater.catalog.parts import SEALED, Alone, Append, Ledger, Refusal, Refused, Term
from headwater.catalog.tails import Watch
from headwater.errors import ConditionFailedError, HeadwaterError, InvalidRequestError


class TailConditions(Ledger["TailIs"]):
    """Where the parts' segments end."""

    def watched(self) -> list[Watch]:
        return [Watch(term.stream, term.segment, True) for term in self.terms]

    def refusal(self, terms: Sequence[TailIs]) -> Refusal | None:
        if len({(term.stream, term.segment) for term in terms}) < len(terms):
            return Refusal(terms[-1], "twice", {})
        for term in terms:
            tail = self.tails.get((term.stream, term.segment))
            if tail is None:
                return Refusal(term, SEALED, {})
            if tail.tail != term.tail:
                return Refusal(term, "moved", {"found": tail.tail})
        return None


@dataclass(frozen=True, slots=True)
class TailIs(Term):
    """The part commits if nothing was appended to a segment since its tail was read."""

    ledger = TailConditions
    stream: int
    segment: int
    tail: int
    block: int = -1

    def error(self, refused: Refused) -> HeadwaterError:
        if refused.reason == "twice":
            return ConditionFailedError(
                "this transaction updates the same shared state twice, each time as it was before: give all updates at once"
            )
        found = refused.facts["found"]
        return ConditionFailedError(
            f"the stream is at revision {found}, not at {self.tail} as when it was read: read it again, decide again", found=found
        )


class SchemaConditions(Ledger["SchemaIs"]):
    """Which versions of schemas the catalog has. One that went back in time may have lost some."""

    def statements(self) -> list[Statement]:
        return [
            ("SELECT stream, version FROM stream_schema WHERE stream = ? AND version = ?", key)
            for key in sorted({(term.stream, term.version) for term in self.terms})
        ]

    def load(self, answers: list[list[Row]]) -> None:
        self._known = {(row[0], row[1]) for rows in answers for row in rows}

    def refusal(self, terms: Sequence[SchemaIs]) -> Refusal | None:
        lost = next((term for term in terms if (term.stream, term.version) not in self._known), None)
        return None if lost is None else Refusal(lost, "unknown schema", {"version": lost.version})


@dataclass(frozen=True, slots=True)
class SchemaIs(Term):
    """The part commits if the catalog knows the version of the schema that its blocks were made with."""

    ledger = SchemaConditions
    stream: int
    version: int
    block: int = -1

    def alone(self, append: Append) -> Alone:
        known = "(SELECT version FROM stream_schema WHERE stream = ? AND version = ?) IS NOT NULL"
        return Alone((known, (self.stream, self.version)))

    def error(self, refused: Refused) -> HeadwaterError:
        return InvalidRequestError(f"the catalog went back in time and lost version {self.version} of a schema: open the stream again")
