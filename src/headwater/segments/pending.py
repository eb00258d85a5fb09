"""What the flusher has in hand: its session with the journal it owns, and flushes whose runs are encoded and on their way."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import google_crc32c
import pyarrow as pa

from headwater.catalog import sessions
from headwater.catalog.conditions import SchemaIs
from headwater.catalog.flushes import Flush
from headwater.catalog.parts import Append, Part, Term
from headwater.catalog.writers import WriterIs
from headwater.model.limits import INLINE_BYTES, MIB, REMOTE_WRITES
from headwater.runtime import failpoints
from headwater.runtime.workers import Task
from headwater.segments.block import EncodedBlock
from headwater.segments.encoding import encode_few, encode_few_rows
from headwater.segments.engine import Engine
from headwater.segments.fewrows import FewRows, few_rows
from headwater.segments.lanes import Lane, Run, StreamRef, given
from headwater.segments.routing import Route
from headwater.storage import layout

#: Up to this many events, of up to this many bytes, are encoded without arrays: making those takes 0.2 to 0.5 ms, a good part of an ack.
FEW_EVENTS = 128
_FEW_BYTES = 1 * MIB
_FOOTER_MAGIC = b"HWF1"
#: A process that stores no large flush for this long keeps no preallocated files.
_PAUSE_SECONDS = 5.0
_ENCODERS = 2


class Session:
    """This process's session, with the journal or objects it owns."""

    def __init__(self, engine: Engine) -> None:
        process = f"{socket.gethostname()}:{os.getpid()}"
        self.last_flush = secrets.randbits(60)
        # Repeatable: a session whose answer was lost is never used, and is fenced when its lease is over.
        self.id = engine.run(sessions.begin_session, process, self.last_flush)
        self.renewed = time.monotonic()
        #: More flushes that are encoded at once would take turns at the interpreter's lock, and the first be on its way later.
        self.encoders = threading.BoundedSemaphore(_ENCODERS)
        self._objects = 0
        self._stored = False
        self._storage = engine.storage
        self._journal = engine.storage.journal(lambda index: layout.journal_key(self.id, index)) if engine.storage.local else None

    @property
    def is_used_up(self) -> bool:
        return self._objects >= layout.INDEXES - REMOTE_WRITES

    def reserve(self) -> int:
        self._objects += 1
        return self._objects

    def store(self, index: int, blocks: _Blocks) -> tuple[int, str, int]:
        """Make a flush's blocks durable; returns (object, its key, position of the first block)."""
        if self._journal is not None:
            self._stored = True
            place = self._journal.append(blocks, blocks.length)
            return layout.object_id(self.id, place.index), place.key, place.offset
        key = layout.object_key(self.id, index)
        self._storage.put(key, [*blocks, blocks.footer])
        return layout.object_id(self.id, index), key, 0

    @property
    def first_file(self) -> int:
        """The journal's file in use: what is stored from now on lies in this file or in a later one."""
        return 0 if self._journal is None else self._journal.first_index

    def first_needed(self, flushes: Iterable[PendingFlush]) -> int:
        """The first file of the journal that these flushes, or any that is stored from now on, may name."""
        # The file in use is looked at first: a flush that begins meanwhile lies after it.
        first = self.first_file
        for flush in flushes:
            if flush.first_file is not None and flush.first_file < first:
                first = flush.first_file
        return first

    @property
    def pause_seconds(self) -> float | None:
        """After this time without a flush the journal rests. None: it rests already."""
        return _PAUSE_SECONDS if self._stored else None

    def rest(self) -> None:
        """Give back the space that the journal preallocated. The next renewal says so, so that upkeep may delete the last file too."""
        if self._journal is not None and self._stored:
            self._stored = False
            self._journal.rest()
            self.renewed = float("-inf")

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


class Piece:
    """Runs of one lane that are encoded together: one block for each segment of an epoch that they go to."""

    def __init__(self, stream: StreamRef, runs: list[Run], route: Route, turn: int) -> None:
        self.runs = runs
        self._ref = stream
        self._route = route
        self._turn = turn
        #: The blocks by segment; and which of those each event went to, None if there is one.
        self._blocks: list[tuple[int, EncodedBlock]] | None = None
        self.which: Any = None
        self.error: Exception | None = None
        #: Where it lies among what is stored with it; and, once it is stored, the object, its key and its position there.
        self.offset = 0
        self.place: tuple[int, str, int] | None = None

    @property
    def stream(self) -> int:
        return self._ref.id

    @property
    def segments(self) -> int:
        return len(self._route.numbers)

    @property
    def length(self) -> int:
        return sum([_padded(block.length) for _, block in self.encode()])

    def encode(self) -> list[tuple[int, EncodedBlock]]:
        """The blocks, made on first use; none if the runs can't be stored; `error` says why."""
        if self._blocks is None:
            try:
                self._blocks, self.which = _encode(self._ref, self.runs, self._route, self._turn)
            except Exception as error:
                self.fail(error)
        return self._blocks or []

    def fail(self, error: Exception) -> None:
        self._blocks, self.error = [], error

    def let_go(self) -> None:
        """Keep of stored blocks only what the catalog must know."""
        for _, block in self.encode():
            block.make = None

    def begin_again(self) -> None:
        """To be stored, if it was, once more."""
        self.place = None
        if self._blocks and self._blocks[0][1].make is None:
            self._blocks = None

    def to_catalog(self) -> list[Append]:
        appends = []
        at = self.place[2] if self.place is not None else 0
        for segment, block in self.encode():
            if self.place is None:
                append = block.inline(self.stream, segment)
            else:
                append = Append(self.stream, segment, block.count, block.length, block.crc, self.place[0], at, None)
            append.log = self._route.logs[segment]
            appends.append(append)
            at += _padded(block.length)
        return appends


class PendingPart:
    """What commits or fails as one: runs of one lane, in order, and the pieces that the storer makes of them.

    The lane itself is the flusher's; the storer only compares it, and asks the part for the stream and the terms.
    """

    def __init__(self, lane: Lane, runs: list[Run]) -> None:
        self.lane = lane
        self.stream = lane.stream
        self.runs = runs
        self.pieces: list[Piece] = []
        self.routing_error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """Why it can't be stored."""
        for piece in self.pieces:
            if piece.error is not None:
                return piece.error
        return self.routing_error

    def terms(self) -> tuple[Term, ...]:
        """The conditions of the commit: the lane's own, and those of its writer and schema as of now."""
        lane, stream = self.lane, self.stream
        terms = lane.terms
        if lane.writer is not None:
            terms += (WriterIs(stream.id, lane.writer, lane.generation, lane.stored_number, self.runs[-1].last_number),)
        if stream.schema_version > 1:
            terms += (SchemaIs(stream.id, stream.schema_version),)
        return terms


class PendingFlush:
    """Parts that are committed together, under one number of the session."""

    def __init__(self, parts: list[PendingPart]) -> None:
        self.parts = parts
        #: False: its bytes are yet to be handed to the present session.
        self.begun = False
        self.task: Task[None] | None = None
        self.catalog_flush: Flush | None = None
        #: Its bytes lie in this file of the session's journal or in later ones; None if it has none there.
        self.first_file: int | None = None

    @property
    def _pieces(self) -> list[Piece]:
        return [piece for part in self.parts for piece in part.pieces]

    @property
    def segments(self) -> int:
        """How many segments the largest of its parts may go to."""
        return max([piece.segments for piece in self._pieces], default=1)

    @property
    def size(self) -> int:
        """What its runs are counted as against the process's limit."""
        return sum([run.size for part in self.parts for run in part.runs])

    @property
    def is_small(self) -> bool:
        """Whether it goes into the commit itself."""
        # What it is counted as is more than what is stored, and known before it is encoded.
        return self.size <= 3 * INLINE_BYTES and sum([piece.length for piece in self._pieces]) <= INLINE_BYTES

    @property
    def is_ready(self) -> bool:
        """Whether nothing of it is being stored: it is stored, small, or failed to be stored."""
        return self.task is None or self.task.done

    @property
    def is_stored(self) -> bool:
        """Whether its bytes are in the present session's storage, all of them."""
        if not self.begun or self.task is None or not self.task.done or self.task.failed:
            return False
        return not self.failed_parts

    @property
    def failed_parts(self) -> list[PendingPart]:
        return [part for part in self.parts if part.error is not None]

    def begin_again(self) -> None:
        """To be stored, if it was, once more."""
        self.begun, self.task, self.catalog_flush, self.first_file = False, None, None, None
        for piece in self._pieces:
            piece.begin_again()

    def store(self, session: Session, index: int) -> None:
        """Encode all blocks, and make them durable one after the other, with a footer that says what they are."""
        pieces = self._pieces
        with _Turn(session.encoders) as turn:
            while (blocks := _Blocks(pieces, turn.end)).length:
                failpoints.reach("append.encoded")
                try:
                    object, key, position = session.store(index, blocks)
                except _CannotBeMade:
                    continue  # The others are stored without it.
                for piece in pieces:
                    piece.place = object, key, position + piece.offset
                return

    def absorb(self, other: PendingFlush) -> None:
        """Take along another one that is stored too."""
        self.first_file = min([flush.first_file for flush in (self, other) if flush.first_file is not None], default=None)
        mine = {part.lane: part for part in self.parts}
        for part in other.parts:
            if part.lane in mine:
                mine[part.lane].pieces += part.pieces
                mine[part.lane].runs = mine[part.lane].runs + part.runs
            else:
                self.parts.append(part)

    def to_catalog(self, session: Session, inflight: Iterable[PendingFlush]) -> Flush:
        """What the catalog commits, under the session's next number: where the blocks are, or, if they are not stored, the blocks.

        It says which files of the journal the session is done with, by the flushes that are `inflight` besides this one.
        """
        parts = []
        objects: dict[int, str] = {}
        for pending in self.parts:
            appends: list[Append] = []
            for piece in pending.pieces:
                appends += piece.to_catalog()
                if piece.place is not None:
                    objects[piece.place[0]] = piece.place[1]
            parts.append(Part(tuple(appends), pending.terms()))
        first_file = session.first_needed([other for other in inflight if other is not self])
        return Flush(session.id, session.last_flush + 1, tuple(parts), tuple(objects.items()), first_file)


class _CannotBeMade(Exception):
    """A piece failed as its blocks were made; it has no more of them, and says why."""


class _Blocks:
    """All blocks of some pieces one after the other, each made when its turn comes."""

    def __init__(self, pieces: list[Piece], when_made: Callable[[], None]) -> None:
        self._pieces = pieces
        self._when_made = when_made
        contents = []
        self.length = 0
        for piece in pieces:
            piece.offset = self.length
            for segment, block in piece.encode():
                contents.append([piece.stream, segment, self.length, block.length, block.count])
                self.length += _padded(block.length)
        text = json.dumps({"blocks": contents}).encode()
        self.footer = text + struct.pack("<I4s", len(text), _FOOTER_MAGIC)

    def __iter__(self) -> Iterator[Any]:
        for piece in self._pieces:
            piece.begin_again()
            for _, block in piece.encode():
                try:
                    buffers = block.buffers()
                except Exception as error:
                    piece.fail(error)
                    raise _CannotBeMade from error
                yield from buffers
                if block.length % 8:
                    yield bytes(-block.length % 8)
            piece.let_go()
        self._when_made()


class _Turn:
    """A place among those that encode, until it is ended or the block is left."""

    def __init__(self, encoders: threading.BoundedSemaphore) -> None:
        self._encoders: threading.BoundedSemaphore | None = encoders

    def __enter__(self) -> Self:
        assert self._encoders is not None
        self._encoders.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        encoders, self._encoders = self._encoders, None
        if encoders is not None:
            encoders.release()


def _padded(length: int) -> int:
    return length + -length % 8


def _encode(stream: StreamRef, runs: list[Run], route: Route, turn: int) -> tuple[list[tuple[int, EncodedBlock]], Any]:
    offset = 0
    if stream.kind == "bytes":
        for run in runs:
            run.count, run.offset = sum(map(len, run.values)), offset
            offset += run.count
        return [(route.numbers[0], _raw_block(runs))], None
    if _are_few(runs):
        few = None if stream.is_opaque else few_rows(stream.schema)
        if few is not None or stream.is_opaque:
            return _encode_few(stream, runs, route, turn, few)
    for run in runs:
        run.offset = offset - run.skipped
        offset += run.count
    spread = route.spread(given(runs), turn)
    return spread.encode(stream.schema_version, stream.is_opaque), spread.which


def _encode_few(
    stream: StreamRef, runs: list[Run], route: Route, turn: int, few: FewRows | None
) -> tuple[list[tuple[int, EncodedBlock]], Any]:
    values: list[Any] = []
    keys: list[bytes | None] = []
    for run in runs:
        run.offset = len(values) - run.skipped
        values += run.values
        keys += run.keys
    spread, which = route.spread_few(values, keys, turn)
    version = stream.schema_version
    if few is None:
        return [(segment, encode_few(some, their_keys, version)) for segment, some, their_keys in spread], which
    return [(segment, encode_few_rows(some, their_keys, few, version)) for segment, some, their_keys in spread], which


def _are_few(runs: list[Run]) -> bool:
    """Whether these are a few events, given one by one, that need no arrays."""
    count = size = 0
    for run in runs:
        count += run.count
        size += run.size
        if count > FEW_EVENTS or size > _FEW_BYTES or run.chunk is not None or run.times:
            return False
    return True


def _raw_block(runs: list[Run]) -> EncodedBlock:
    buffers = [pa.py_buffer(value) for run in runs for value in run.values]
    crc = 0
    for buffer in buffers:
        crc = google_crc32c.extend(crc, buffer)
    length = sum(buffer.size for buffer in buffers)
    return EncodedBlock(length, length, lambda: (buffers, crc))
