"""The protocol that every storage keeps, and the values it speaks in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from headwater.errors import CorruptDataError

#: Anything with the buffer protocol.
Buffer: TypeAlias = bytes | bytearray | memoryview | pa.Buffer
#: `list` is a method of Storage, so inside the class the type needs another name.
Buffers: TypeAlias = list[Buffer]


class ObjectInfo(NamedTuple):
    key: str
    bytes: int
    modified_us: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a journal put one append: `offset` bytes into the file `key`, its `index`th."""

    key: str
    index: int
    offset: int


class Journal(Protocol):
    """Appends blocks to preallocated files of one session. Several threads may append at once."""

    def append(self, buffers: Iterable[Buffer], length: int | None = None) -> Place:
        """Store the buffers one after the other, durable on return, at an offset that is a multiple of 8.

        With the `length` of all of them they may be made as they are asked for, which may be more than once.

        After an UnavailableError nothing of them counts: repeat the call, which begins a new file.
        """

    @property
    def first_index(self) -> int:
        """The index of the file in use: no later append goes to a file with a lower one."""

    def rest(self) -> None:
        """Give back the space that was preallocated and not used. The next append begins a new file."""

    def close(self) -> None:
        """Give back the space that was preallocated and not used. What was appended stays."""


class Push:
    """Gives the disk a file's bytes while the file is written, a part at a time. Does nothing until a storage binds it to a file."""

    def __init__(self) -> None:
        self._give: Callable[[int], None] = lambda end: None

    def bind(self, give: Callable[[int], None]) -> None:
        """Let `give` take what is written up to an offset."""
        self._give = give

    def __call__(self, end: int) -> None:
        """Give the disk what was written up to an offset, once it has what it was given before."""
        self._give(end)


class Storage(Protocol):
    """Immutable objects under keys like `l0/0000000000a1/000003.hwb`. Used from several threads.

    Every call may raise UnavailableError, which means: repeat it.
    """

    #: What `open_storage` opens the same storage with.
    url: str
    #: True: journals exist and a put is cheap. False: puts are slow, and several should run at once.
    local: bool

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Store the buffers as one object, durable on return. The same put again succeeds; with other bytes it is an AlreadyExistsError."""

    def write(self, key: str, produce: Callable[[pa.NativeFile], None], push: Push | None = None) -> None:
        """Store as one object, durable on return, what `produce` writes into the file it is given. No such object may exist.

        `produce` may call `push`, which local storage binds to the file.
        """

    def get(self, key: str, start: int, length: int) -> Buffer:
        """Read exactly `length` bytes; a missing or shorter object is a CorruptDataError."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Buffers:
        """Read several ranges (start, length) of one object, with as few requests as pay. The buffers may share memory."""

    def expect(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        """Hear of ranges that will be read soon. True: they are on their way to memory, and reading them then is no long wait."""

    def size(self, key: str) -> int | None:
        """The object's size in bytes, None if there is none."""

    def delete(self, keys: Sequence[str], rest: Callable[[], None] = lambda: None) -> None:
        """Delete objects; those that are missing are fine. `rest` is called now and then where deleting keeps the disk busy."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below `prefix`, which is empty or ends with a slash, in order of their keys."""

    def journal(self, key_for: Callable[[int], str]) -> Journal:
        """Begin a journal whose files are called `key_for(0)`, `key_for(1)` ...; one session owns it. Local storage only."""

    def close(self) -> None:
        """Let go of files and connections. What is stored stays."""


def byte_view(buffer: Buffer) -> memoryview:
    """A buffer as a flat view of bytes."""
    view = memoryview(buffer)
    # pyarrow's buffers are signed and a numpy array's may be anything: what writes them wants plain bytes.
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def byte_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """The buffers as flat views of bytes, without the empty ones."""
    return [view for view in map(byte_view, buffers) if view.nbytes]


def is_equal(views: Sequence[memoryview], stored: Buffer) -> bool:
    """Whether the views, one after the other, are what is stored."""
    rest = memoryview(stored).cast("B")
    for view in views:
        if rest[: view.nbytes] != view:
            return False
        rest = rest[view.nbytes :]
    return not rest.nbytes


def missing_error(key: str, start: int, length: int) -> CorruptDataError:
    return CorruptDataError(
        f"{key} is missing: {length} bytes at {start} were wanted", object=key, missing=True, start=start, wanted=length, available=0
    )


def short_error(key: str, start: int, length: int, available: int) -> CorruptDataError:
    message = f"{key} is too short: {length} bytes at {start} were wanted, {available} were there"
    return CorruptDataError(message, object=key, missing=False, start=start, wanted=length, available=available)
