"""Tiering: blocks become long-term chunks, and small chunks become large ones.

A chunk is written first, from what the catalog names, and then takes the place of exactly those extents in one short transaction. If
anything changed meanwhile, the chunk is garbage and nothing else happened. Readers go by number, so they don't notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from headwater.catalog import tiers
from headwater.catalog.extents import BLOCK, PARQUET, RAW
from headwater.catalog.tiers import Backlog, NewExtent, Piece
from headwater.errors import ConditionFailedError, CorruptDataError
from headwater.model.fieldids import assign
from headwater.model.limits import CHUNK_BYTES, COMPACT_CHUNKS, MIB
from headwater.runtime import failpoints
from headwater.segments import chunk as chunk_module
from headwater.segments.batches import Columns
from headwater.segments.chunk import EXTRA, JOURNAL_GROUP_BYTES, seal_chunk, write_chunk
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.segments.read import SegmentCursor
from headwater.storage import layout
from headwater.storage.interface import Push

#: Raw bytes are cut into extents of about this size, each with a checksum.
_RAW_BYTES = 4 * MIB
#: Fetched ahead: less than for readers, since nobody waits for it and memory is others' too.
_PREFETCH_BYTES = 4 * MIB
#: Between each two of these is what counts as one size when chunks are compacted: enough of one size make one of the next.
_SIZES = (0, MIB // 8, MIB, 8 * MIB, CHUNK_BYTES)


class Moved(NamedTuple):
    """What one chunk replaced."""

    events: int
    extents: int
    raw_bytes: int
    stored_bytes: int


class Chunks:
    """Makes chunks as one session, which has the upkeep's lease."""

    def __init__(self, engine: Engine, session: int, next_index: Callable[[], int]) -> None:
        self._engine = engine
        self._session = session
        self._next_index = next_index

    def tier(self, stream: StreamRef, backlog: Backlog) -> Moved | None:
        """Make a chunk of a log's next blocks; None if there are none. ConditionFailedError if they changed meanwhile."""
        pieces = _fitting(self._engine.run(tiers.list_blocks, backlog.log, backlog.start))
        if not pieces:
            return None
        failpoints.reach("tier.read")
        return self.finish(ChunkJob(stream.id, backlog, tuple(pieces), self._session, self._next_index()).run(self._engine, stream))

    def plan(self, stream: StreamRef, backlog: Backlog) -> list[ChunkJob]:
        """All that can be made of a log's blocks now, as jobs that may run in other processes."""
        jobs = []
        at = backlog.start
        while pieces := _fitting(self._engine.run(tiers.list_blocks, backlog.log, at)):
            jobs.append(ChunkJob(stream.id, backlog, tuple(pieces), self._session, self._next_index()))
            at = pieces[-1].end
        return jobs

    def compact(self, stream: StreamRef, backlog: Backlog) -> Moved | None:
        """Make one chunk of a log's small ones, if there are enough of them; None if there are not."""
        held = self._engine.run(tiers.list_held, backlog.log)
        found = self._engine.run(tiers.list_small, backlog.log, backlog.start)
        found = [chunk for chunk in found if not any(chunk.first < until and start < chunk.end for start, until in held)]
        chosen = choose_chunks(found, is_sealed=backlog.is_sealed)
        if len(chosen) > 1:
            return self.finish(ChunkJob(stream.id, backlog, tuple(chosen), self._session, self._next_index()).run(self._engine, stream))
        if not held:
            # Don't look again before there are more.
            self._engine.run(tiers.count_small, backlog.log, -1 if backlog.is_sealed else min(len(found), COMPACT_CHUNKS - 1))
        return None

    def delete_inline(self, log: int, until: int) -> None:
        """Delete the inline blocks whose events are in chunks, in slices."""
        while self._engine.run(tiers.delete_inline, log, until):
            failpoints.reach("tier.sliced")

    def finish(self, made: MadeChunk) -> Moved:
        """Put a chunk in the place of what it was made of. ConditionFailedError if that changed meanwhile: then it is garbage."""
        job, old = made.job, made.job.old
        self._engine.run(tiers.swap, self._session, job.backlog.log, old, made.new, (made.object, made.key))
        failpoints.reach("tier.swapped")
        if old[-1].form == BLOCK:
            self.delete_inline(job.backlog.log, old[-1].end)
        return Moved(old[-1].end - old[0].first, len(old), sum(piece.bytes for piece in old), sum(extent.length for extent in made.new))


class ChunkJob(NamedTuple):
    """Extents to be made one chunk. Any process may do it, also twice: only what `Chunks.finish` is given counts."""

    stream: int
    backlog: Backlog
    old: tuple[Piece, ...]
    session: int
    number: int

    def run(self, engine: Engine, stream: StreamRef, attempt: str = "") -> MadeChunk:
        """Write the chunk. `attempt` keeps tries of the same job apart."""
        suffix = f"{f'-{attempt}' if attempt else ''}.{'bytes' if stream.kind == 'bytes' else 'parquet'}"
        key = layout.chunk_key(stream.name, stream.id, self.backlog.segment, self.old[0].first, self.session, self.number, suffix)
        numbers = self.old[0].first, self.old[-1].end
        cursor = SegmentCursor(engine, stream, self.backlog.segment, *numbers, prefetch_bytes=_PREFETCH_BYTES, log=self.backlog.log)
        if stream.kind == "bytes":
            new = _write_raw(engine, key, cursor)
        else:
            new = [_write_parquet(engine, key, cursor, stream, self.old)]
        # What took a chunk's memory is the process's again, which has other things to do than this.
        pa.default_memory_pool().release_unused()
        failpoints.reach("tier.written")
        return MadeChunk(self, tuple(new), layout.object_id(self.session, self.number), key)


class MadeChunk(NamedTuple):
    """A chunk that is written, and not yet in its place."""

    job: ChunkJob
    new: tuple[NewExtent, ...]
    object: int
    key: str


def choose_chunks(chunks: Sequence[Piece], *, is_sealed: bool) -> list[Piece]:
    """Neighbours to make one of: enough of about one size, so that each byte is written again only a few times.

    A sealed log gets no more, so there any two that fit are joined.
    """
    runs: list[list[Piece]] = []
    for chunk in chunks:
        if runs and runs[-1][-1].end == chunk.first:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    if is_sealed:
        for run in runs:
            for start in range(len(run) - 1):
                if len(fitting := _fitting(run[start:])) > 1:
                    return fitting
        return []
    for low, high in pairwise(_SIZES):
        for some in _below(runs, high):
            # Smaller ones go along. They are no reason by themselves: a large one would be written again for a few bytes.
            alike = [place for place, chunk in enumerate(some) if chunk.bytes >= low]
            if len(alike) >= COMPACT_CHUNKS:
                return _fitting(some[alike[0] :])
    return []


def _below(runs: list[list[Piece]], size: int) -> Iterator[list[Piece]]:
    """Neighbours that are all smaller than a size."""
    for run in runs:
        for is_smaller, some in groupby(run, key=lambda chunk: chunk.bytes < size):
            if is_smaller:
                yield list(some)


def _fitting(chunks: Sequence[Piece]) -> list[Piece]:
    """As many of the first as fit into one chunk."""
    found: list[Piece] = []
    size = 0
    for chunk in chunks:
        size += chunk.bytes
        if found and size > CHUNK_BYTES:
            break
        found.append(chunk)
    return found


def _write_parquet(engine: Engine, key: str, cursor: SegmentCursor, stream: StreamRef, old: Sequence[Piece]) -> NewExtent:
    columns = Columns([*stream.schema.names, *EXTRA])

    def batches() -> Iterator[pa.RecordBatch]:
        while (batch := cursor.next_batch()) is not None:
            if not batch.schema.equals(stream.schema):
                raise ConditionFailedError("the schema changed while a chunk was written")
            yield batch.to_arrow(columns)

    push, between = _paced(engine)
    ids = assign(engine.schema_history(stream.id, stream.schema_version))
    group_bytes = JOURNAL_GROUP_BYTES if stream.kind == "journal" else chunk_module.ROW_GROUP_BYTES
    written = partial(
        write_chunk,
        schema=stream.schema,
        version=stream.schema_version,
        batches=batches(),
        ids=ids,
        group_bytes=group_bytes,
        is_busy=engine.pace.is_busy,
        between=between,
    )
    engine.storage.write(key, lambda sink: _check_rows(written(sink), old), push)
    info = seal_chunk(engine.storage, key)
    last_at = old[-1].last_at or old[-1].appended_at
    raw = sum(piece.bytes for piece in old)
    return NewExtent(old[0].first, old[-1].end - old[0].first, info.length, info.crc, old[0].appended_at, 0, PARQUET, raw, last_at)


def _paced(engine: Engine) -> tuple[Push, Callable[[int], None]]:
    """Two calls: one pushes a chunk's file to the disk, the other is made with the file's length between two row groups."""
    push, rest = Push(), engine.pace.begin()

    def between(end: int) -> None:
        if engine.pace.is_busy():
            # A sync of the whole chunk at its end would keep the small ones of others waiting.
            push(end)
        rest()

    return push, between


def _check_rows(rows: int, old: Sequence[Piece]) -> None:
    expected = old[-1].end - old[0].first
    if rows != expected:
        raise CorruptDataError(
            f"a chunk got {rows} events, and the catalog names {expected} from event {old[0].first} on", object="a chunk"
        )


def _write_raw(engine: Engine, key: str, cursor: SegmentCursor) -> list[NewExtent]:
    new: list[NewExtent] = []
    push, between = _paced(engine)

    def produce(sink: pa.NativeFile) -> None:
        new.clear()
        at, position = cursor.number, 0
        crc = size = first_at = last_at = 0
        while (found := cursor.next_block()) is not None:
            if not size:
                first_at = found.appended_at
            sink.write(found.data)
            crc, size, last_at = google_crc32c.extend(crc, found.data), size + found.data.size, found.last_at
            if size >= _RAW_BYTES or cursor.is_done:
                new.append(NewExtent(at, size, size, crc, first_at, position, RAW, size, last_at))
                at, position, crc, size = at + size, position + size, 0, 0
                between(position)

    engine.storage.write(key, produce, push)
    return new
