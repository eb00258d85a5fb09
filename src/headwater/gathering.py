"""Gathering: blocks and terms made of what a transaction was given, for the segments that are open now."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from headwater.catalog.parts import Append
from headwater.catalog.tables import EntryChange
from headwater.catalog.transactions import Batch
from headwater.contents import STAGE_BYTES, Contents, StreamEvents, chunk_size
from headwater.errors import NotFoundError, SealedError
from headwater.model.limits import INLINE_BYTES
from headwater.segments.block import Chunk, EncodedBlock
from headwater.segments.encoding import encode, encode_few, encode_few_rows
from headwater.segments.engine import Engine
from headwater.segments.fewrows import few_rows
from headwater.segments.pending import FEW_EVENTS
from headwater.segments.routing import Route, Router
from headwater.storage import layout
from headwater.tables import changes_chunk

#: Up to this size blocks go into the catalog: an object of a transaction's own takes three syncs, which cost more.
_INLINE_BYTES = 4 * INLINE_BYTES


def gather(engine: Engine, router: Router, contents: Contents, transaction: str) -> Batch:
    """All of it as one batch of a transaction; large blocks are in storage by then."""
    batch = Batch(contents.id)
    blocks = []
    for events in list(contents.events.values()):
        if not events.is_empty:
            route = _route(router, contents, events)
            batch.widths[events.stream.id] = len(route.numbers)
            blocks += [(events.stream.id, segment, route.logs[segment], block) for segment, block in _encode(events, route)]
    for table, changes in contents.tables.values():
        batch.terms += [
            EntryChange(table.id, change.key, change.value, change.expected, place, len(blocks)) for place, change in enumerate(changes)
        ]
        chunk = changes_chunk([change.key for change in changes], [change.value for change in changes])
        blocks.append((table.id, 0, 0, encode([chunk], table.schema_version, False)))
    for journal in contents.journals.values():
        if not journal.is_empty:
            journal.gather(batch, blocks)
    size = sum(block.length for *_, block in blocks)
    at = 0
    buffers: list[Any] = []
    for stream_id, segment, log, block in blocks:
        own = block.buffers()
        data = b"".join(own) if size <= _INLINE_BYTES else None
        batch.appends.append(Append(stream_id, segment, block.count, block.length, block.crc, None, at, data, log))
        if data is None:
            buffers += own
            at += block.length
    if buffers:
        batch.object_key = layout.transaction_key(transaction, uuid.uuid4().hex)
        engine.storage.put(batch.object_key, buffers)
    batch.appends += [append for _, append, _ in contents.states]
    batch.terms += [*(expected for _, _, expected in contents.states), *contents.readers, *contents.terms]
    return batch


def forget_routes(router: Router, contents: Contents, opened: Mapping[int, Mapping[int, int]]) -> None:
    """Look at the segments again that events go to, before the next use; not at those of streams where these are the open ones."""
    for ref in [*(events.stream for events in contents.events.values()), *(each.ref for each in contents.journals.values())]:
        router.forget(ref, unless=opened.get(ref.id, ()))


def look_again(router: Router, contents: Contents) -> None:
    """After a segment was found closed: NotFoundError or SealedError if a stream, a table or shared state can't be written any more."""
    forget_routes(router, contents, {})
    contents.look_up()
    for ref in [*(table for table, _ in contents.tables.values()), *(stream for stream, _, _ in contents.states)]:
        # Their one segment is only closed for good.
        router.forget(ref)
        router.route(ref)


def _route(router: Router, contents: Contents, events: StreamEvents) -> Route:
    try:
        return router.route(events.stream)
    except (NotFoundError, SealedError):
        contents.look_up()
        return router.route(events.stream)


def _encode(events: StreamEvents, route: Route) -> list[tuple[int, EncodedBlock]]:
    """One block, or a few large ones, for each segment the events go to."""
    version = events.stream.schema_version
    few = few_rows(events.stream.schema) if not events.is_opaque else None
    if (few or events.is_opaque) and 0 < len(events.values) <= FEW_EVENTS and not events.chunks and not events.times:
        spread, _ = route.spread_few(events.values, events.keys, 0)
        if few is None:
            return [(segment, encode_few(values, keys, version)) for segment, values, keys in spread]
        return [(segment, encode_few_rows(values, keys, few, version)) for segment, values, keys in spread]
    found = []
    for chunks in _parts(events.close_chunk()):
        found += route.spread(chunks, 0).encode(version, events.is_opaque)
    return found


def _parts(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    """The chunks in order, each part small enough for one block."""
    part: list[Chunk] = []
    size = 0
    for chunk in chunks:
        pieces = max(1, min(chunk.count, -(-chunk_size(chunk) // STAGE_BYTES)))
        for index in range(pieces):
            piece = chunk.slice(chunk.count * index // pieces, chunk.count * (index + 1) // pieces) if pieces > 1 else chunk
            if part and size >= STAGE_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += chunk_size(chunk) // pieces
    if part:
        yield part
