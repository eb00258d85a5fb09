"""One segment's numbers: without a gap from head to tail, each in a block that is sound."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.catalog import extents, segments, tags
from headwater.catalog.database import Tx
from headwater.catalog.extents import Extent
from headwater.catalog.operations import operation
from headwater.catalog.segments import SegmentRow
from headwater.check.blocks import BlockCheck, SeenObjects
from headwater.check.report import CheckReport, Problem
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef

_SLICE_EXTENTS = 128


@operation("read")
def find_pieces(tx: Tx, stream: int, number: int) -> list[tuple[int, int, int]]:
    """(log, first, until) of the logs that hold a segment's numbers, in order; none if the segment is gone."""
    row = segments.find_segment(tx, stream, number)
    return segments.list_pieces(tx, row) if row is not None else []


class SegmentCheck(BlockCheck):
    """Checks one segment, slice by slice; each step of `run` is a slice done."""

    def __init__(self, engine: Engine, stream: StreamRef, row: SegmentRow, report: CheckReport, objects: SeenObjects) -> None:
        super().__init__(engine, stream, report, objects)
        self._row = row
        self._log = row.log
        self._has_gap = False

    def run(self) -> Iterator[None]:
        for start, end in self._needed(self._row):
            at = start
            for log, first, until in self._engine.run(find_pieces, self._stream.id, self._row.number):
                first, until = min(first, end), min(until, end)
                if at < first:
                    self._add_gap(at, first)
                elif start < first < at:
                    self._add("overlap", f"{self._unit} {first}-{at - 1} are in two logs")
                yield from self._check_piece(log, max(at, first), until)
                at = max(at, until)
        self._check_counters()
        if self._stream.kind == "events" and not self._row.dropped:
            self._report.events += self._row.tail - self._row.head
        self._report_lost(f"{self._where}, {self._unit}", self._row.number)

    def _needed(self, row: SegmentRow) -> list[tuple[int, int]]:
        """The numbers of the segment that must be readable: from head to tail, and what tags keep."""
        pins = self._engine.run(tags.get_pins, self._stream.id).get(row.number, [])
        ranges = sorted([*pins, *([] if row.dropped else [(row.head, row.tail)])])
        joined: list[tuple[int, int]] = []
        for start, end in ranges:
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            elif start < end:
                joined.append((start, end))
        return joined

    def _check_piece(self, log: int, start: int, end: int) -> Iterator[None]:
        """Numbers [start, end) of the segment, all of which are in one log: its own, or for a fork its parent's."""
        at, appended_at = start, 0
        before: Extent | None = None
        while at < end:
            found = extents.plan(self._engine.database, log, at, end, _SLICE_EXTENTS)
            if not found:
                self._add_gap(at, end, log)
                return
            if before is not None and found[0].first < at and self._is_replaced(log, before):
                appended_at, at = 0, found[0].first  # Upkeep made one chunk of what was checked before and what comes now.
            for extent in found:
                if extent.first > at:
                    self._add_gap(at, extent.first, log)
                elif extent.first < at != start:
                    self._add("overlap", f"{self._unit} {extent.first}-{at - 1} are in two blocks")
                if extent.appended_at < appended_at:
                    self._add("counter", f"the block at event {extent.first} was appended before the one in front of it, says the catalog")
                appended_at = max(appended_at, extent.last_at or extent.appended_at)
                at = max(at, extent.end)
            if at > end == self._row.tail and log == self._row.log and self._find_row() == self._row:
                self._add("overlap", f"its tail is {end}, but its last block goes on to {at}")
            self._log = log
            self._check_extents(found)
            before = found[-1]
            yield

    def _is_replaced(self, log: int, extent: Extent) -> bool:
        """Whether the catalog has another extent by now where this one was."""
        now = extents.plan(self._engine.database, log, extent.first, extent.first + 1, 1)
        return not now or (now[0].first, now[0].count) != (extent.first, extent.count)

    @property
    def _unit(self) -> str:
        return "bytes" if self._stream.kind == "bytes" else "events"

    @property
    def _where(self) -> str:
        return f"{self._stream.name} segment {self._row.number}"

    def _add(self, kind: str, message: str) -> None:
        self._report.add(Problem(kind, f"{self._where}: {message}", self._stream.name, self._row.number))

    def _add_gap(self, start: int, end: int, log: int | None = None) -> None:
        """Note numbers that no block of a log holds, or, without one, that are in no log, unless they are truncated by now."""
        row = self._find_row()
        if row is None or not any(first <= start < until for first, until in self._needed(row)):
            return
        if log is None:
            # A fork's rows of other logs go only with its segment, which is there.
            self._add("gap", f"no log holds {self._unit} {start}-{end - 1}, which are from the stream it was forked from")
            return
        again = extents.plan(self._engine.database, log, start, end, 1)
        if not again or again[0].first > start:
            self._has_gap = True
            self._add("gap", f"no block holds {self._unit} {start}-{end - 1}")

    def _check_counters(self) -> None:
        """What the segment's row says of its own log, in one look."""
        rows = self._engine.database.query(
            "SELECT s.bytes, (SELECT COALESCE(sum(COALESCE(e.raw, e.length)), 0) FROM extent e WHERE e.log = s.log), "
            "(SELECT min(e.first) FROM extent e WHERE e.log = s.log AND e.first >= s.tail) FROM segment s WHERE s.log = ?",
            (self._row.log,),
        )
        for stated, stored, beyond in rows:
            if beyond is not None:
                self._add("overlap", f"there is a block at event {beyond}, behind its tail")
            if stated != stored and not self._has_gap:
                self._add("counter", f"its blocks have {stored:,} bytes, its row says {stated:,}")

    def _find_row(self) -> SegmentRow | None:
        return self._engine.run(segments.find_segment, self._stream.id, self._row.number)

    def _still_names(self, extent: Extent) -> bool:
        if self._find_row() is None:
            return False
        again = extents.plan(self._engine.database, self._log, extent.first, extent.end, 1)
        return [(found.first, found.object) for found in again] == [(extent.first, extent.object)]
