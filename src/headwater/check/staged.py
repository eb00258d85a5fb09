"""What transactions have staged: blocks that nobody sees yet, and that must be sound when their transaction commits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from headwater.catalog.database import Row
from headwater.catalog.extents import Extent
from headwater.check.blocks import BlockCheck, SeenObjects
from headwater.check.report import CheckReport
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef

_SLICE_BLOCKS = 32


class StagedCheck(BlockCheck):
    """Checks some of the blocks that one transaction has staged for one stream."""

    def __init__(self, engine: Engine, stream: StreamRef, transaction: str, report: CheckReport, objects: SeenObjects) -> None:
        super().__init__(engine, stream, report, objects)
        self._transaction = transaction

    def run(self, found: list[Extent]) -> None:
        self._check_extents(found)
        self._report_lost(f"{self._stream.name}, staged by transaction {self._transaction} as its part", None)

    def _still_names(self, extent: Extent) -> bool:
        sql = "SELECT e.object FROM txn_extent e JOIN stream s ON s.id = e.stream WHERE e.txn = ? AND e.ordinal = ?"
        return self._engine.database.query(sql, (self._transaction, extent.first)) == [(extent.object,)]


def list_staged(engine: Engine) -> Iterator[tuple[str, int, list[Extent]]]:
    """(transaction, stream, blocks) of all that is staged for streams that are there, in slices. A block's number is its ordinal."""
    after = ("", 0)
    while rows := engine.database.query(
        "SELECT e.txn, e.ordinal, e.stream, e.count, e.length, e.crc, e.position, e.object, o.key, e.data "
        "FROM txn_extent e JOIN stream s ON s.id = e.stream LEFT JOIN object o ON o.id = e.object "
        "WHERE (e.txn, e.ordinal) > (?, ?) ORDER BY e.txn, e.ordinal LIMIT ?",
        (*after, _SLICE_BLOCKS),
    ):
        after = rows[-1][:2]
        for (transaction, stream), some in groupby(rows, key=lambda row: (row[0], row[2])):
            yield transaction, stream, [_extent(row) for row in some]


def _extent(row: Row) -> Extent:
    _, ordinal, _, count, length, crc, position, object, key, data = row
    # Limited to its own number, whatever it counts: the next block has the next one.
    return Extent(ordinal, count, length, crc, 0, position, object, key, data, limit=ordinal + 1)
