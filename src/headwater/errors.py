"""Every error a caller can get. The class says what to do next; typed attributes carry the facts; all survive pickling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from headwater.model.cuts import Cut
    from headwater.model.positions import Position


class HeadwaterError(Exception):
    """Anything headwater raises on purpose."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def again(self) -> Self:
        """The same, to be raised once more: with its old traceback it would keep what all calls that got it had in hand."""
        return self.with_traceback(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[HeadwaterError], message: str, facts: dict[str, Any]) -> HeadwaterError:
    return kind(message, **facts)


def is_of_system(error: OSError) -> bool:
    """Whether it is the operating system's, and not a TimeoutError, say, that a caller's signal handler raised in the midst of our code."""
    return error.errno is not None or type(error) is OSError


class InvalidRequestError(HeadwaterError, ValueError):
    """The request itself is wrong and will never work. Nothing changed: correct the call."""


class NotFoundError(HeadwaterError, LookupError):
    """What was named does not exist. Create it, or correct the name."""


class AlreadyExistsError(HeadwaterError):
    """The name is taken, by something that differs from what was asked for. The message shows the difference."""


class ConflictError(HeadwaterError):
    """The state does not allow it now. Nothing changed: look again and decide again.

    Of a claimed stream, `owner` is who claimed it.
    """

    @property
    def owner(self) -> str | None:
        owner = self.facts.get("owner")
        return None if owner is None else str(owner)


class ConditionFailedError(ConflictError):
    """The state moved between the read and the write. Nothing changed: read again, decide again.

    Of a journal: `id` was to be persisted, `expected` and `actual` are sequences, `position` is of an event that may not be there.
    """

    def __init__(
        self,
        message: str,
        id: str | None = None,
        expected: Any = None,
        actual: int | None = None,
        position: Position | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message, **facts)
        self.id = id
        self.expected = expected
        self.actual = actual
        self.position = position

    def __reduce__(self) -> tuple[Any, ...]:
        own = {"id": self.id, "expected": self.expected, "actual": self.actual, "position": self.position}
        return _rebuild, (type(self), self.message, {**own, **self.facts})


class SealedError(ConflictError):
    """The stream is sealed: it can be read for ever, and never written again."""


class TransactionEndedError(ConflictError):
    """The transaction was committed or aborted already. Ask for its status; begin another."""


class FencedError(HeadwaterError):
    """Someone else took over this identity. Nothing of this call was stored: stop."""


class TruncatedError(HeadwaterError):
    """The data asked for was truncated. Go on from `head`, the first place that is still readable."""

    def __init__(self, message: str, head: Cut | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.head = head

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {"head": self.head, **self.facts})


class RolledBackError(HeadwaterError):
    """The stream was rolled back to before this place, or another took its name. Go on from `cut`, the last place before it that is left.

    What lay past it is in the stream that the roll-back kept it as.
    """

    def __init__(self, message: str, cut: Cut | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.cut = cut

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {"cut": self.cut, **self.facts})


class UnavailableError(HeadwaterError):
    """Something is out of reach for now (a lock, a disk with room, a server). Nothing is lost: repeat the call."""


class OutcomeUnknownError(HeadwaterError):
    """The answer was lost: it may or may not have happened. Ask for the state; do not just repeat."""


class CorruptDataError(HeadwaterError):
    """Stored bytes are missing or are not what was written. `object` names where; other data is unaffected."""

    def __init__(self, message: str, object: str | None = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.object = object

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {"object": self.object, **self.facts})
