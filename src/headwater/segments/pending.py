"""What the flusher has in hand: its session with the journal it owns, and flushes whose runs are encoded and on their way."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import Any

import google_crc32c
import pyarrow as pa

from headwater.catalog import sessions
from headwater.catalog.flushes import Append, Flush, Part
from headwater.model.limits import INLINE_BYTES, REMOTE_WRITES
from headwater.runtime.workers import Task
from headwater.segments.block import EncodedBlock, encode, encode_few
from headwater.segments.engine import Engine
from headwater.segments.lanes import Lane, Run
from headwater.segments.routing import Route
from headwater.storage import layout

#: Up to so many events are encoded without arrays: making those takes 0.2 ms, a good part of an ack.
FEW_EVENTS = 32
_FOOTER_MAGIC = b"HWF1"


class Session:
    """This process's session, with the journal or objects it owns."""

    def __init__(self, engine: Engine) -> None:
        process = f"{socket.gethostname()}:{os.getpid()}"
        # Repeatable: a session whose answer was lost is never used, and is fenced when its lease is over.
        self.id = engine.database.write(lambda tx: sessions.begin_session(tx, process), repeatable=True)
        self.last_flush = 0
        self.renewed = time.monotonic()
        self._objects = 0
        self._storage = engine.storage
        self._journal = engine.storage.journal(lambda index: layout.journal_key(self.id, index)) if engine.storage.local else None

    @property
    def is_used_up(self) -> bool:
        return self._objects >= layout.INDEXES - REMOTE_WRITES

    def reserve(self) -> int:
        self._objects += 1
        return self._objects

    def store(self, index: int, buffers: list[Any], footer: bytes) -> tuple[int, str, int]:
        """Make a flush's blocks durable; returns (object, its key, position of the first block)."""
        if self._journal is not None:
            place = self._journal.append(buffers)
            return layout.object_id(self.id, place.index), place.key, place.offset
        key = layout.object_key(self.id, index)
        self._storage.put(key, [*buffers, footer])
        return layout.object_id(self.id, index), key, 0

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


class PendingPart:
    """Runs of one lane on their way to the segments of one epoch."""

    def __init__(self, lane: Lane, runs: list[Run], route: Route, turn: int) -> None:
        self.lane = lane
        self.runs = runs
        self._route = route
        self._turn = turn
        #: One block for each segment the runs go to; and which of those each event went to, None if there is one.
        self.blocks: list[tuple[int, EncodedBlock]] | None = None
        self.which: Any = None
        self.error: Exception | None = None
        self.offset = 0

    @property
    def size(self) -> int:
        return sum([run.size for run in self.runs])

    @property
    def length(self) -> int:
        return sum([_padded(block.length) for _, block in self.encode()])

    def encode(self) -> list[tuple[int, EncodedBlock]]:
        """The blocks, made on first use; none if the runs can't be stored; `error` says why."""
        if self.blocks is None:
            try:
                self.blocks, self.which = _encode(self.lane, self.runs, self._route, self._turn)
            except Exception as error:
                self.blocks, self.error = [], error
        return self.blocks


class PendingFlush:
    """Parts that are stored together and committed together, under one number of the session."""

    def __init__(self, parts: list[PendingPart]) -> None:
        self.parts = parts
        #: False: its bytes are yet to be handed to the present session.
        self.begun = False
        self.task: Task[tuple[int, str, int] | None] | None = None
        self.catalog_flush: Flush | None = None

    @property
    def is_small(self) -> bool:
        """Whether it goes into the commit itself."""
        return sum([part.size for part in self.parts]) <= INLINE_BYTES and sum([part.length for part in self.parts]) <= INLINE_BYTES

    def buffers(self) -> tuple[list[Any], bytes]:
        """All blocks one after the other, and the footer that says what they are."""
        buffers: list[Any] = []
        contents, at = [], 0
        for part in self.parts:
            part.offset = at
            for segment, block in part.encode():
                contents.append([part.lane.stream.id, segment, at, block.length, block.count])
                buffers += block.buffers
                if block.length % 8:
                    buffers.append(bytes(-block.length % 8))
                at += _padded(block.length)
        text = json.dumps({"blocks": contents}).encode()
        return buffers, text + struct.pack("<I4s", len(text), _FOOTER_MAGIC)

    def to_catalog(self, session: Session, place: tuple[int, str, int] | None) -> Flush:
        """What the catalog commits, under the session's next number. `place` is where the blocks are; None: they go along inline."""
        parts = []
        for pending in self.parts:
            lane = pending.lane
            appends, at = [], pending.offset
            for segment, block in pending.encode():
                if place is None:
                    append = Append(segment, block.count, block.length, block.crc, None, 0, block.to_bytes())
                else:
                    append = Append(segment, block.count, block.length, block.crc, place[0], place[2] + at, None)
                appends.append(append)
                at += _padded(block.length)
            numbers = lane.generation, pending.runs[-1].last_number, lane.expected_tail
            parts.append(Part(lane.stream.id, tuple(appends), lane.writer, *numbers))
        objects = () if place is None else ((place[0], place[1]),)
        return Flush(session.id, session.last_flush + 1, tuple(parts), objects)


def _padded(length: int) -> int:
    return length + -length % 8


def _encode(lane: Lane, runs: list[Run], route: Route, turn: int) -> tuple[list[tuple[int, EncodedBlock]], Any]:
    offset = 0
    if lane.stream.kind == "bytes":
        for run in runs:
            run.count, run.offset = run.size, offset
            offset += run.count
        return [(route.numbers[0], _raw_block(runs))], None
    if lane.stream.is_opaque and _are_few(runs):
        return _encode_few(lane, runs, route, turn)
    chunks = []
    for run in runs:
        run.freeze()
        assert run.chunk is not None
        run.offset = offset
        offset += run.count
        chunks.append(run.chunk)
    spread, which = route.spread(chunks, turn)
    return [(segment, encode(some, lane.stream.schema_version, lane.stream.is_opaque)) for segment, some in spread], which


def _encode_few(lane: Lane, runs: list[Run], route: Route, turn: int) -> tuple[list[tuple[int, EncodedBlock]], Any]:
    values: list[bytes] = []
    keys: list[bytes | None] = []
    for run in runs:
        run.offset = len(values)
        values += run.values
        keys += run.keys
    spread, which = route.spread_few(values, keys, turn)
    return [(segment, encode_few(some, their_keys, lane.stream.schema_version)) for segment, some, their_keys in spread], which


def _are_few(runs: list[Run]) -> bool:
    """Whether these are a few events, given one by one, that need no arrays."""
    return sum(run.count for run in runs) <= FEW_EVENTS and all(run.chunk is None and not run.times for run in runs)


def _raw_block(runs: list[Run]) -> EncodedBlock:
    buffers = [pa.py_buffer(value) for run in runs for value in run.values]
    crc = 0
    for buffer in buffers:
        crc = google_crc32c.extend(crc, buffer)
    length = sum(buffer.size for buffer in buffers)
    return EncodedBlock(buffers, length, length, crc)
