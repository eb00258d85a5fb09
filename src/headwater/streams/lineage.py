"""Which segments may be read now: each one only after its predecessors, over any number of them.

Numbers grow along every key, so the last segment seen over a key is the direct predecessor of the next one there. Adding segments by
number and finishing them costs about their own number, not its square: a stream that scaled for years has thousands.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from headwater.streams.cuts import Range


class Lineage:
    """Ranges that wait for their predecessors. Add them in the order of their numbers; take those that are ready; finish them."""

    def __init__(self) -> None:
        # The newest segment over each key, as neighbours: where each begins and ends, and its number.
        self._starts: list[int] = []
        self._newest: list[tuple[int, int]] = []
        self._blockers: dict[int, int] = {}
        self._successors: dict[int, list[int]] = {}
        self._waiting: dict[int, Range] = {}
        self._ready: list[Range] = []
        self._finished: set[int] = set()

    def __bool__(self) -> bool:
        """Whether some are waiting, or ready and not taken."""
        return bool(self._waiting or self._ready)

    @property
    def waiting(self) -> list[Range]:
        """Those that wait for others."""
        return list(self._waiting.values())

    def add(self, item: Range) -> None:
        number, (start, end) = item.segment.number, item.segment.keys
        low = max(0, bisect_right(self._starts, start) - 1)
        if low < len(self._newest) and self._newest[low][0] <= start:
            low += 1
        high = bisect_left(self._starts, end)
        covered = list(zip(self._starts[low:high], self._newest[low:high], strict=True))
        blockers = {other for _, (_, other) in covered if other not in self._finished}
        # What lies beside the new segment's keys keeps its place.
        pieces = [(start, (end, number))]
        if covered and covered[0][0] < start:
            pieces.insert(0, (covered[0][0], (start, covered[0][1][1])))
        if covered and covered[-1][1][0] > end:
            pieces.append((end, covered[-1][1]))
        self._starts[low:high] = [piece[0] for piece in pieces]
        self._newest[low:high] = [piece[1] for piece in pieces]
        for other in blockers:
            self._successors.setdefault(other, []).append(number)
        if blockers:
            self._blockers[number] = len(blockers)
            self._waiting[number] = item
        else:
            self._ready.append(item)

    def take_ready(self) -> list[Range]:
        """Those that may be read now; each is given once."""
        found, self._ready = self._ready, []
        return found

    def finish(self, number: int) -> None:
        """A segment is read to its end: its successors may be ready."""
        self._finished.add(number)
        for other in self._successors.pop(number, ()):
            self._blockers[other] -= 1
            if not self._blockers[other]:
                del self._blockers[other]
                self._ready.append(self._waiting.pop(other))
