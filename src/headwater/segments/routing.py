"""Which segment an event goes to: the open segments of a stream by key range, looked up once and again when one was sealed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.catalog import streams
from headwater.errors import NotFoundError, SealedError
from headwater.model.keys import hash_key
from headwater.segments.block import Chunk, EncodedBlock, join, whole_column
from headwater.segments.encoding import encode, encode_each
from headwater.segments.engine import Engine
from headwater.segments.lanes import Loose, StreamRef

#: Pieces of a chunk that are smaller on average cost more than a copy of the chunk.
_PIECE_EVENTS = 128


class Spread(NamedTuple):
    """Events, and the segments they go to."""

    segments: tuple[int, ...]
    chunks: list[Chunk | Loose]
    #: Which of the segments each event goes to; None: all to the one.
    which: Any

    def encode(self, schema_version: int, opaque: bool) -> list[tuple[int, EncodedBlock]]:
        """One block for each segment."""
        if opaque:
            blocks = encode_each(self.chunks, self.which, schema_version)
        else:
            blocks = [encode(chunks, schema_version, False) for chunks in self._chunks_of_each()]
        return list(zip(self.segments, blocks, strict=True))

    def _chunks_of_each(self) -> list[list[Chunk]]:
        """The chunks of each segment: rows of many columns are put in order as a whole, and cut."""
        if self.which is None:
            return [_whole(self.chunks)]
        found: list[list[Chunk]] = [[] for _ in self.segments]
        start = 0
        for chunk in self.chunks:
            which = self.which[start : start + chunk.count]
            start += chunk.count
            ordered = chunk.take(np.argsort(which, kind="stable"))
            at = 0
            for own, count in zip(found, np.bincount(which, minlength=len(found)).tolist(), strict=True):
                if count:
                    own.append(ordered.slice(at, at + count))
                at += count
        return found


class Route:
    """The open segments of one stream."""

    def __init__(self, numbers: list[int], starts: list[int], logs: list[int]) -> None:
        self.numbers = tuple(numbers)
        #: Each segment's log, which tells it from another that has its number.
        self.logs = dict(zip(numbers, logs, strict=True))
        self._start_list = starts
        self._starts = np.array(starts, dtype=np.uint64)

    def find(self, place: int) -> int:
        """The segment of a place in the routing space."""
        return self.numbers[bisect_right(self._start_list, place) - 1]

    def spread(self, chunks: Sequence[Chunk | Loose], turn: int) -> Spread:
        """The chunks' events by segment. Those without a key all go to one segment, another with each turn."""
        own = turn % len(self.numbers)
        if len(self.numbers) == 1 or all(chunk.keys is None for chunk in chunks):
            return Spread((self.numbers[own],), list(chunks), None)
        joined = list(_joined(chunks, _PIECE_EVENTS * len(self.numbers)))
        places = self._places(joined, own)
        used = np.flatnonzero(np.bincount(places))
        rank = np.zeros(len(self.numbers), dtype=np.uint16)
        rank[used] = np.arange(len(used))
        return Spread(tuple([self.numbers[index] for index in used.tolist()]), joined, rank[places])

    def _places(self, chunks: Sequence[Chunk | Loose], own: int) -> Any:
        """Which of the segments each event goes to; those without a key to our own. Each key is hashed once."""
        keys = whole_column([chunk.keys for chunk in chunks], [chunk.count for chunk in chunks], pa.binary()).dictionary_encode()
        unique = keys.dictionary.to_pylist()
        hashes = np.fromiter(map(hash_key, unique), dtype=np.uint64, count=len(unique))
        places = np.append(np.searchsorted(self._starts, hashes, side="right") - 1, own).astype(np.uint16)
        return places[keys.indices.fill_null(len(unique)).to_numpy(zero_copy_only=False)]

    def spread_few(
        self, values: list[Any], keys: list[bytes | None], turn: int
    ) -> tuple[list[tuple[int, list[Any], list[bytes | None]]], Any]:
        """Like `spread`, for so few events that arrays of them would cost more than they save."""
        own = turn % len(self.numbers)
        places = [own if key is None else bisect_right(self._start_list, hash_key(key)) - 1 for key in keys]
        used = sorted(set(places))
        if len(used) == 1:
            return [(self.numbers[used[0]], values, keys)], None
        chosen = [[index for index, other in enumerate(places) if other == place] for place in used]
        found = [
            (self.numbers[place], [values[index] for index in indices], [keys[index] for index in indices])
            for place, indices in zip(used, chosen, strict=True)
        ]
        return found, bytes([used.index(place) for place in places])


def _whole(chunks: Sequence[Chunk | Loose]) -> list[Chunk]:
    return [chunk.whole() if isinstance(chunk, Loose) else chunk for chunk in chunks]


def _joined(chunks: Sequence[Chunk | Loose], least: int) -> Iterator[Chunk | Loose]:
    """The chunks in order, each joined with those behind it until it has so many events."""
    waiting: list[Chunk | Loose] = []
    for index, chunk in enumerate(chunks, 1):
        waiting.append(chunk)
        if index == len(chunks) or sum(one.count for one in waiting) >= least:
            yield chunk if len(waiting) == 1 else join(_whole(waiting))
            waiting = []


class Router:
    """The routes of the streams a process writes to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._routes: dict[int, Route] = {}
        self._refs: dict[str, StreamRef] = {}

    def remember(self, ref: StreamRef) -> None:
        """Of a stream of opaque events, or of a table, nothing changes but whether it is there: its name is not looked up each time."""
        if ref.kind == "table" or (ref.kind == "events" and ref.is_opaque):
            self._refs[ref.name] = ref

    def remembered(self, name: str, kind: str) -> StreamRef | None:
        found = self._refs.get(name)
        return found if found is not None and found.kind == kind else None

    def forget_name(self, name: str) -> None:
        self._refs.pop(name, None)

    def forget_stream(self, stream: int) -> None:
        self._routes.pop(stream, None)

    def route(self, stream: StreamRef) -> Route:
        """SealedError or NotFoundError if the stream can't be written any more."""
        found = self._routes.get(stream.id)
        if found is None:
            found = self._routes[stream.id] = _open_route(self._engine, stream)
        return found

    def forget(self, stream: StreamRef, *, unless: Collection[int] = ()) -> None:
        """Look at a stream's segments again before the next use, unless these are the ones that are known."""
        found = self._routes.get(stream.id)
        if found is not None and set(found.numbers) != set(unless):
            self._routes.pop(stream.id, None)


def _open_route(engine: Engine, stream: StreamRef) -> Route:
    try:
        row, found = engine.run(streams.get_with_open_segments, stream.id)
    except NotFoundError:
        raise NotFoundError(f"stream {stream.name} was deleted") from None
    if row.sealed_at is not None:
        raise SealedError(f"stream {stream.name} is sealed")
    rows = sorted(found, key=lambda row: row.keys.start)
    if not rows:
        raise NotFoundError(f"stream {stream.name} was deleted")
    return Route([row.number for row in rows], [row.keys.start for row in rows], [row.log for row in rows])
