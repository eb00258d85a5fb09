"""Which segment an event goes to: the open segments of a stream by key range, looked up once and again when one was sealed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.catalog import segments, streams
from headwater.catalog.database import Tx
from headwater.errors import NotFoundError, SealedError
from headwater.model.keys import hash_key, hash_keys
from headwater.segments.block import Chunk
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef


class Route:
    """The open segments of one stream."""

    def __init__(self, numbers: list[int], starts: list[int]) -> None:
        self.numbers = tuple(numbers)
        self._start_list = starts
        self._starts = np.array(starts, dtype=np.uint64)

    def spread(self, chunks: list[Chunk], turn: int) -> tuple[list[tuple[int, list[Chunk]]], Any]:
        """The chunks' events by segment, and for each event which of those it went to (None: all to the one).

        Events without a key all go to one segment, another with each turn.
        """
        if len(self.numbers) == 1:
            return [(self.numbers[0], chunks)], None
        if all(chunk.keys is None for chunk in chunks):
            return [(self.numbers[turn % len(self.numbers)], chunks)], None
        chunk = chunks[0] if len(chunks) == 1 else _joined(chunks)
        assert chunk.keys is not None
        place = np.searchsorted(self._starts, hash_keys(chunk.keys), side="right") - 1
        if chunk.keys.null_count:
            place[chunk.keys.is_null().to_numpy(zero_copy_only=False)] = turn % len(self.numbers)
        order = np.argsort(place, kind="stable")
        used, firsts = np.unique(place[order], return_index=True)
        sorted_chunk = chunk.take(order)
        bounds = [*firsts.tolist(), chunk.count]
        found = [
            (self.numbers[index], [sorted_chunk.slice(start, end)])
            for index, start, end in zip(used.tolist(), bounds, bounds[1:], strict=False)
        ]
        return found, np.searchsorted(used, place).astype(np.uint16)

    def spread_few(
        self, values: list[bytes], keys: list[bytes | None], turn: int
    ) -> tuple[list[tuple[int, list[bytes], list[bytes | None]]], Any]:
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
        return found, np.array([used.index(place) for place in places], dtype=np.uint16)


def _joined(chunks: list[Chunk]) -> Chunk:
    columns = pa.concat_batches([chunk.columns for chunk in chunks])
    keys = pa.concat_arrays([chunk.keys if chunk.keys is not None else pa.nulls(chunk.count, pa.binary()) for chunk in chunks])
    times = None
    if any(chunk.times is not None for chunk in chunks):
        kind = next(chunk.times.type for chunk in chunks if chunk.times is not None)
        times = pa.concat_arrays([chunk.times if chunk.times is not None else pa.nulls(chunk.count, kind) for chunk in chunks])
    return Chunk(columns, keys, times)


class Router:
    """The routes of the streams a process writes to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._routes: dict[int, Route] = {}

    def route(self, stream: StreamRef) -> Route:
        """SealedError or NotFoundError if the stream can't be written any more."""
        found = self._routes.get(stream.id)
        if found is None:
            found = self._routes[stream.id] = self._engine.read(_open_route, stream)
        return found

    def forget(self, stream: StreamRef, *, unless: Collection[int] = ()) -> None:
        """Look at a stream's segments again before the next use, unless these are the ones that are known."""
        found = self._routes.get(stream.id)
        if found is not None and set(found.numbers) != set(unless):
            self._routes.pop(stream.id, None)


def _open_route(tx: Tx, stream: StreamRef) -> Route:
    row = streams.get_stream(tx, stream.id)
    if row.sealed_at is not None:
        raise SealedError(f"stream {stream.name} is sealed")
    rows = sorted(segments.list_open_segments(tx, stream.id), key=lambda row: row.keys.start)
    if not rows:
        raise NotFoundError(f"stream {stream.name} was deleted")
    return Route([row.number for row in rows], [row.keys.start for row in rows])
