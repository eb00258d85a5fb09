"""Blocks: each one's bytes as they were written, its events as many as the catalog says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from headwater.catalog.extents import BLOCK, PARQUET, RAW, Extent
from headwater.check.report import CheckReport, Problem
from headwater.errors import CorruptDataError, HeadwaterError, UnavailableError
from headwater.model.limits import MIB
from headwater.segments.block import decode, verify
from headwater.segments.chunk import read_footer
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.storage import Storage, layout

_INLINE = "the catalog (inline block)"
_FETCH_BYTES = 8 * MIB
_SHOWN_RANGES = 4


class SeenObjects:
    """The objects that blocks were found in, over all segments: what the catalog calls them, and whether storage has them."""

    def __init__(self, storage: Storage) -> None:
        self.named: set[int] = set()
        self._storage = storage
        self._found: dict[str, bool] = {}

    def has(self, key: str) -> bool:
        if key not in self._found:
            self._found[key] = self._storage.size(key) is not None
        return self._found[key]


class _Lost(NamedTuple):
    """Blocks that can't be read for one reason, by the numbers they hold."""

    kind: str
    object: str
    message: str
    ranges: list[tuple[int, int]]


class BlockCheck(ABC):
    """Checks blocks of one stream. Those that it finds are told apart by the numbers of their extents."""

    def __init__(self, engine: Engine, stream: StreamRef, report: CheckReport, objects: SeenObjects) -> None:
        self._engine = engine
        self._stream = stream
        self._report = report
        self._objects = objects
        self._lost: dict[tuple[str, str, int | None], _Lost] = {}

    @abstractmethod
    def _still_names(self, extent: Extent) -> bool:
        """Whether the catalog still says that these bytes hold events: rows go before bytes do, and a stream's schemas with it."""

    def _report_lost(self, where: str, segment: int | None) -> None:
        for lost in self._lost.values():
            message = f"{where} {_shown(lost.ranges)}: {lost.message}"
            self._report.add(Problem(lost.kind, message, self._stream.name, segment, lost.object))

    def _check_extents(self, found: Sequence[Extent]) -> None:
        group: list[Extent] = []
        size = 0
        for extent in found:
            self._report.blocks += 1
            self._report.bytes += extent.length
            if extent.form not in self._forms(extent):
                self._add_lost(extent, "damaged", extent.key or _INLINE, f"the catalog says that this is of form {extent.form}")
                continue
            if extent.object is None:
                self._check_inline(extent)
                continue
            self._objects.named.add(extent.object)
            if extent.key is None:
                key = _key_of(extent.object, self._engine.storage.local)
                self._add_lost(extent, "dangling", key, f"the catalog has no row for the object {key} that it names")
                continue
            if extent.form == PARQUET:
                self._check_chunk(extent, extent.key)
                continue
            if group and (extent.key != group[0].key or size + extent.length > _FETCH_BYTES):
                self._check_group(group)
                group, size = [], 0
            group.append(extent)
            size += extent.length
        if group:
            self._check_group(group)

    def _forms(self, extent: Extent) -> tuple[int, ...]:
        """What an extent may be here: chunks are objects, raw in a stream of bytes."""
        if extent.object is None:
            return (BLOCK,)
        return (BLOCK, RAW) if self._stream.kind == "bytes" else (BLOCK, PARQUET)

    def _check_inline(self, extent: Extent) -> None:
        if extent.data is None:
            self._add_lost(extent, "missing", _INLINE, "the catalog has no bytes for a block that it names")
        else:
            self._check_block(extent, pa.py_buffer(extent.data), _INLINE)

    def _check_group(self, group: Sequence[Extent]) -> None:
        key = group[0].key
        assert key is not None
        if ("missing", key, None) in self._lost:
            for extent in group:
                self._add_lost(extent, "missing", key, "")
            return
        try:
            # Asked for apart from reading: a file that was deleted can still be read by whoever has it open.
            if not self._objects.has(key):
                raise CorruptDataError(f"{key} is missing", object=key, missing=True)
            buffers = self._engine.storage.get_ranges(key, [(extent.position, extent.length) for extent in group])
        except CorruptDataError as error:
            if len(group) > 1 and not error.facts.get("missing"):
                for extent in group:
                    self._check_group([extent])
                return
            kind, message = ("missing", f"{key} is missing") if error.facts.get("missing") else ("damaged", error.message)
            for extent in group:
                self._add_lost(extent, kind, key, message)
            return
        except UnavailableError as error:
            for extent in group:
                self._add_lost(extent, "unreadable", key, error.message)
            return
        for extent, data in zip(group, buffers, strict=True):
            self._check_block(extent, pa.py_buffer(data), key)

    def _check_chunk(self, extent: Extent, key: str) -> None:
        """Read all of a Parquet chunk: its footer's checksum, every page's, the numbers and as many events as the catalog says."""
        try:
            if not self._objects.has(key):
                raise CorruptDataError(f"{key} is missing", object=key, missing=True)
            if bytes(self._engine.storage.get(key, 0, 4)) != b"PAR1":
                raise CorruptDataError(f"{key} does not begin as a Parquet file does", object=key)
            # Not a footer that is in memory: the stored one counts.
            file = read_footer(self._engine.storage, extent)
            for group in file.row_groups(extent.first, extent.end):
                chunk, _ = file.read(self._engine.storage, group.places, None)
                chunk.columns.validate(full=True)
                file.check_numbers(self._engine.storage, group.places)
            file.check_filters(self._engine.storage)
        except CorruptDataError as error:
            kind = "missing" if error.facts.get("missing") else "damaged"
            self._add_lost(extent, kind, key, error.message)
        except UnavailableError as error:
            self._add_lost(extent, "unreadable", key, error.message)
        except pa.ArrowException as error:
            self._add_lost(extent, "damaged", key, f"{key} can't be decoded: {error}")

    def _check_block(self, extent: Extent, data: pa.Buffer, name: str) -> None:
        try:
            if data.size != extent.length:
                raise CorruptDataError(f"a block in {name} has {data.size} bytes instead of {extent.length}", object=name)
            if self._stream.kind == "bytes":
                count = data.size
                if google_crc32c.value(data) != extent.crc:
                    raise CorruptDataError(f"a block in {name} is damaged: its checksum does not match the catalog's", object=name)
            else:
                verify(data, extent.crc, name)
                count = self._count(data, name)
            if count != extent.count:
                raise CorruptDataError(f"a block in {name} has {count} events, the catalog says {extent.count}", object=name)
        except CorruptDataError as error:
            self._add_lost(extent, "damaged", name, error.message)

    def _count(self, data: pa.Buffer, name: str) -> int:
        """The events of a verified block, all of which are looked at."""
        try:
            block = decode(data, lambda version: self._engine.schema(self._stream.id, version), name)
            block.chunk.columns.validate(full=True)
        except HeadwaterError:
            raise
        except Exception as error:  # Bytes with the right checksum that are no block: whatever pyarrow makes of them.
            raise CorruptDataError(f"a block in {name} can't be decoded: {error}", object=name) from error
        return block.chunk.count

    def _add_lost(self, extent: Extent, kind: str, object: str, message: str) -> None:
        """Note a block that can't be read, unless it went by right meanwhile. Blocks lost with one object make one problem."""
        alone = kind == "damaged" or object == _INLINE
        place = (kind, object, extent.first if alone else None)
        lost = self._lost.get(place)
        if lost is None:
            if not self._still_names(extent):
                return
            lost = self._lost[place] = _Lost(kind, object, message, [])
        if lost.ranges and lost.ranges[-1][1] == extent.first:
            lost.ranges[-1] = (lost.ranges[-1][0], extent.end)
        else:
            lost.ranges.append((extent.first, extent.end))


def _key_of(object: int, local: bool) -> str:
    if object < 0:
        return f"{layout.TRANSACTION_PREFIX}... (staged object {-object})"
    session, index = layout.parse_object_id(object)
    return layout.journal_key(session, index) if local else layout.object_key(session, index)


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{start}-{end - 1}" for start, end in ranges[:_SHOWN_RANGES])
    return f"{shown} and {len(ranges) - _SHOWN_RANGES} more ranges" if len(ranges) > _SHOWN_RANGES else shown
