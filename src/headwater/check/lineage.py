"""Whether the segments of a stream tile the key space in every epoch. Pure: rows in, sentences out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from headwater.catalog.segments import SegmentRow
from headwater.model.keys import KEY_SPACE, KeyRange


def find_lineage_faults(rows: Sequence[SegmentRow], *, epoch: int, is_sealed: bool, next_segment: int) -> list[str]:
    """What is wrong with a stream's segments.

    Truncation drops the oldest segments of a key, so an old epoch may lack some. What is there must not overlap, each sealed segment's
    keys must be covered by its successors, and the newest segments tile the whole space.
    """
    if not rows:
        return ["it has no segments"]
    faults = [fault for row in rows for fault in _row_faults(row, epoch, is_sealed, next_segment)]
    newest = epoch + 1 if is_sealed else None
    active = [row for row in rows if row.sealed_epoch == newest]
    covered = _cover(active, f"epoch {epoch}", faults)
    if covered != [(0, KEY_SPACE)]:
        faults.append(f"the newest segments {_numbers(active)} don't cover the whole key space")
    made, sealed, rolled = defaultdict(list), defaultdict(list), defaultdict(list)
    for row in rows:
        if row.made_epoch == row.sealed_epoch:
            # A roll puts a transaction's segment between the old segments and those that follow, all in one epoch.
            rolled[row.made_epoch].append(row)
            continue
        made[row.made_epoch].append(row)
        if row.sealed_epoch is not None and row.sealed_epoch != newest:
            sealed[row.sealed_epoch].append(row)
    is_whole = len(rows) == next_segment
    for at in sorted({*made, *sealed, *rolled}):
        new = _cover(made[at], f"epoch {at}", faults)
        old = _cover(sealed[at], f"those sealed in epoch {at}", faults)
        if not all(_lies_in(part, new) for part in [*old, *_cover(rolled[at], f"those rolled in epoch {at}", faults)]):
            numbers = _numbers([*sealed[at], *rolled[at]])
            faults.append(f"segments {numbers}, sealed in epoch {at}, have no successors for some of their keys")
        elif is_whole and at and old != new:
            faults.append(f"segments {_numbers(made[at])}, made in epoch {at}, cover other keys than those they replaced")
    return faults


def _row_faults(row: SegmentRow, epoch: int, is_sealed: bool, next_segment: int) -> list[str]:
    faults = []
    if not 0 <= row.head <= row.tail:
        faults.append(f"segment {row.number} has its head at {row.head} and its tail at {row.tail}")
    if row.number >= next_segment:
        faults.append(f"segment {row.number} exists, but the next one to be made would be {next_segment}")
    if row.made_epoch > epoch or (row.sealed_epoch is not None and not row.made_epoch <= row.sealed_epoch <= epoch + is_sealed):
        faults.append(f"segment {row.number} was made in epoch {row.made_epoch} and sealed in {row.sealed_epoch}, of {epoch} epochs")
    if is_sealed and row.is_open:
        faults.append(f"segment {row.number} is open, but the stream is sealed")
    return faults


def _cover(rows: Iterable[SegmentRow], what: str, faults: list[str]) -> list[tuple[int, int]]:
    """The keys that rows cover, as few ranges as possible; an overlap is noted as a fault."""
    covered: list[tuple[int, int]] = []
    before: SegmentRow | None = None
    for row in sorted(rows, key=lambda row: row.keys):
        if before is not None and row.keys.overlaps(before.keys):
            faults.append(f"segments {before.number} and {row.number} of {what} cover the same keys")
        if covered and covered[-1][1] >= row.keys.start:
            covered[-1] = (covered[-1][0], max(covered[-1][1], row.keys.end))
        else:
            covered.append((row.keys.start, row.keys.end))
        before = row if before is None or row.keys.end > before.keys.end else before
    return covered


def _lies_in(part: tuple[int, int] | KeyRange, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(start <= part[0] and part[1] <= end for start, end in ranges)


def _numbers(rows: Iterable[SegmentRow]) -> list[int]:
    return [row.number for row in rows]
