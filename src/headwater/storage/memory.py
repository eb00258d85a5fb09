"""Storage in this process's memory, for tests: the same rules, nothing durable beyond the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from headwater.errors import AlreadyExistsError
from headwater.model.limits import MIB
from headwater.runtime import failpoints
from headwater.runtime.clock import now_us
from headwater.storage.files import explaining
from headwater.storage.interface import Buffer, Buffers, Journal, ObjectInfo, Place, Push, byte_views, missing_error, short_error

_JOURNAL_BYTES = MIB

_storages: dict[str, MemoryStorage] = {}
_storages_lock = threading.Lock()


def open_memory(name: str) -> MemoryStorage:
    """The storage called `name` in this process, made by the first caller; it lives as long as the process."""
    with _storages_lock:
        if name not in _storages:
            _storages[name] = MemoryStorage(name)
        return _storages[name]


class MemoryStorage:
    """Objects in a dictionary. `close` keeps them: another `open_memory` of the name finds them again."""

    local = True

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes | bytearray, int]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        data = b"".join(byte_views(buffers))
        with explaining("write", key):
            failpoints.reach("object.put")
        with self._lock:
            stored, _ = self._objects.setdefault(key, (data, now_us()))
        if stored != data:
            raise AlreadyExistsError(f"{key} exists with other bytes: {len(stored)} are stored, {len(data)} were given", key=key)

    def write(self, key: str, produce: Callable[[pa.NativeFile], None], push: Push | None = None) -> None:
        file = pa.BufferOutputStream()
        produce(file)
        self.put(key, [file.getvalue()])

    def get(self, key: str, start: int, length: int) -> Buffer:
        if not length:
            return b""
        stored, _ = self._objects.get(key, (None, 0))
        if stored is None:
            raise missing_error(key, start, length)
        found = memoryview(stored).toreadonly()[start : start + length]
        if found.nbytes < length:
            raise short_error(key, start, length, found.nbytes)
        return found

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Buffers:
        return [self.get(key, start, length) for start, length in ranges]

    def expect(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        return True

    def size(self, key: str) -> int | None:
        stored, _ = self._objects.get(key, (None, 0))
        return None if stored is None else len(stored)

    def delete(self, keys: Sequence[str], rest: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        assert not prefix or prefix.endswith("/"), prefix
        with self._lock:
            found = [ObjectInfo(key, len(data), at) for key, (data, at) in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(found))

    def journal(self, key_for: Callable[[int], str]) -> Journal:
        return MemoryJournal(self, key_for)

    def close(self) -> None:
        """Nothing to let go of."""

    def _place(self, key: str, file: bytearray) -> None:
        with self._lock:
            self._objects[key] = (file, now_us())

    def _trim(self, key: str, used: int) -> None:
        with self._lock:
            if key in self._objects:
                file, at = self._objects.pop(key)
                if used:
                    self._objects[key] = (bytes(memoryview(file)[:used]), at)


class MemoryJournal:
    """A journal of fixed arrays, which readers may look into while it goes on writing behind what they see."""

    def __init__(self, storage: MemoryStorage, key_for: Callable[[int], str]) -> None:
        self._storage = storage
        self._key_for = key_for
        self._mutex = threading.Lock()
        self._index = -1
        self._file = bytearray()
        self._used = 0
        self._closed = False

    def append(self, buffers: Iterable[Buffer], length: int | None = None) -> Place:
        data = b"".join(byte_views(buffers))
        assert data, "an empty append has no place"
        with self._mutex:
            assert not self._closed, "the journal is closed"
            if self._used + len(data) > len(self._file):
                self._trim()
                self._index += 1
                # Never resized: a reader's view of it would forbid that.
                self._file = bytearray(max(_JOURNAL_BYTES, len(data)))
                self._used = 0
                self._storage._place(self._key_for(self._index), self._file)
                with explaining("write", self._key_for(self._index)):
                    failpoints.reach("journal.created")
            offset = self._used
            self._file[offset : offset + len(data)] = data
            self._used = offset + len(data) + -len(data) % 8
            with explaining("write", self._key_for(self._index)):
                failpoints.reach("journal.written")
            return Place(self._key_for(self._index), self._index, offset)

    @property
    def first_index(self) -> int:
        with self._mutex:
            return self._index if self._file else self._index + 1

    def rest(self) -> None:
        with self._mutex:
            self._leave()

    def close(self) -> None:
        with self._mutex:
            self._leave()
            self._closed = True

    def _leave(self) -> None:
        self._trim()
        self._file, self._used = bytearray(), 0

    def _trim(self) -> None:
        if self._index >= 0 and self._used < len(self._file):
            self._storage._trim(self._key_for(self._index), self._used)
