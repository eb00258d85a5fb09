"""Parts of a commit: the blocks that a part appends, and the terms on which it commits.

A part commits as a whole or is refused as a whole. What a term means is known to the ledger of its noun alone, so a new kind of condition
or of change is one more ledger, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.tails import Tails, Watch
from headwater.errors import HeadwaterError


@dataclass(slots=True)
class Append:
    """One block for one segment: its bytes are inline in `data`, or durable in an object already."""

    stream: int
    segment: int
    count: int
    length: int
    crc: int
    object: int | None
    position: int
    data: bytes | None
    #: The segment's log, as it was looked up: the number may be another's in a catalog that went back in time. 0: any log will do.
    log: int = 0


class Stored(NamedTuple):
    """A part that committed: the first number of each of its appends."""

    firsts: tuple[int, ...]
    appended_at: int
    #: What a ledger answered to the part's terms, unless the answer to the commit was lost.
    answer: Any = None


class Refused(NamedTuple):
    """A part that was left out, and why. `term` is the place of the term that refused it; -1: a segment is not open, or not there."""

    reason: str
    facts: dict[str, Any]
    term: int = -1


PartResult = Stored | Refused
#: A segment to append to was sealed, or is gone: look again at what is open.
SEALED = "sealed"
#: A segment to append to is claimed by somebody else, the `owner` of the facts.
CLAIMED = "claimed"
#: The part appends to a stream that it rolls back or replaces.
REWOUND = "rewound"


class Refusal(NamedTuple):
    """Why a ledger refuses a part; the facts are JSON values."""

    term: Term
    reason: str
    facts: dict[str, Any]


class Placed(NamedTuple):
    """A term of a part that commits, with the stream, the segment and the first number of its block (-1, -1, 0 without one)."""

    term: Any
    stream: int
    segment: int
    first: int


class Alone(NamedTuple):
    """How a term is committed in one round trip, beside one block and no other part. A plan decides whatever is not as it says here."""

    #: What must be true of the catalog while the block's segment and those to watch are locked, and the tail is moved.
    condition: Statement
    #: The changes, after the block is there. They may violate a constraint, if a plan must make them.
    changes: Sequence[Statement] = ()
    #: Gives the pairs that the ledger would answer as a dict.
    answer: Statement | None = None
    #: Segments to lock beside the block's.
    watched: Sequence[Watch] = ()


class Term:
    """A condition of a part, a change that it makes, or both: a small value, which its `ledger` checks and applies.

    Subclasses are frozen dataclasses of JSON values; one field, `data`, may be bytes. So a transaction can stage any term as a row.
    """

    __slots__ = ()
    ledger: ClassVar[type[Ledger[Any]]]
    #: Which of the part's blocks the term is about; -1: none.
    block: int

    def error(self, refused: Refused) -> HeadwaterError:
        """What the caller of a refused part gets."""
        raise NotImplementedError

    def of_block(self, block: int) -> Self:
        """The same term, where blocks are counted anew."""
        return dataclasses.replace(self, block=block)  # type: ignore[type-var]

    def alone(self, append: Append) -> Alone | None:
        """How to commit a part of this block in one round trip. None: only a plan can check this term, or change what it changes."""
        return None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        _kinds[cls.__name__] = cls


T = TypeVar("T", bound=Term)
_kinds: dict[str, type[Any]] = {}


class Ledger(Generic[T]):
    """What the terms of one noun check and change in a commit. One is made for each commit that has such terms."""

    def __init__(self, tails: Tails, terms: Sequence[T]) -> None:
        #: The segments that the commit locked; complete once the locks are held.
        self.tails = tails
        #: The terms of all parts.
        self.terms = terms

    def find(self, tx: Tx) -> None:
        """Look up what to watch now, for terms that were given some time ago. Without a lock, so the locks may find it changed."""

    def guards(self) -> Iterable[int]:
        """Streams to lock before anything else is looked up, so that no other commit scales, truncates or seals them."""
        return ()

    def watched(self) -> Iterable[Watch]:
        """Segments to lock beside those that are appended to."""
        return ()

    def statements(self) -> list[Statement]:
        """What to lock and to look up, after all segments are locked and in the same round trip."""
        return []

    def load(self, answers: list[list[Row]]) -> None:
        """Take the answers to `statements`."""

    def look(self, tx: Tx) -> None:
        """Look up what depends on those answers."""

    def refusal(self, terms: Sequence[T]) -> Refusal | None:
        """Why a part with these terms can't commit after the parts before it. Changes nothing."""
        return None

    def change(self, placed: Sequence[Placed]) -> Any:
        """Note what a part that commits changes. What is returned, the part's caller gets along with its places."""

    def enter(self, tx: Tx) -> None:
        """Write the changes of all parts."""


class Staged(Protocol):
    """Blocks that a transaction staged before: they are moved to their places without being read."""

    @property
    def segments(self) -> Sequence[tuple[int, int]]:
        """The streams and segments that they were staged for."""

    def place(self, tx: Tx, tails: Tails, now: int) -> list[tuple[int, int, int]]:
        """Append the blocks behind the tails; returns the stream, the segment and the first number of each, if a term asks for it."""


@dataclass(frozen=True)
class Part:
    """What commits or is refused as one. Staged blocks come before `appends`, also in how terms count blocks."""

    appends: tuple[Append, ...] = ()
    terms: tuple[Term, ...] = ()
    staged: Staged | None = field(default=None, compare=False)


def dump_term(term: Term) -> tuple[str, str, bytes | None]:
    """(kind, fields, data) of a term, to be staged; its block is not among the fields."""
    found = {each.name: getattr(term, each.name) for each in dataclasses.fields(term)}  # type: ignore[arg-type]
    del found["block"]
    data = found.pop("data", None)
    return type(term).__name__, json.dumps(found), data


def load_term(kind: str, fields: str, data: bytes | None, block: int) -> Any:
    """The term that was staged, for a block counted anew."""
    made = _kinds[kind]
    found = {name: _frozen(value) for name, value in json.loads(fields).items()}
    if any(each.name == "data" for each in dataclasses.fields(made)):
        found["data"] = None if data is None else bytes(data)
    return made(**found, block=block)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
