"""Checking a whole store: rows that fit together, and every block read, verified and decoded.

Works beside writers, truncation and deletion: what is found wrong is looked at again before it is called damage.
"""

from __future__ import annotations

from collections.abc import Iterator

from headwater.catalog import journals, rebuilds, segments, streams
from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.segments import SegmentRow
from headwater.catalog.streams import FILLING, StreamRow
from headwater.check import rows, unused
from headwater.check.blocks import SeenObjects
from headwater.check.indexes import find_index_faults, find_lost_rows
from headwater.check.lineage import find_lineage_faults
from headwater.check.numbers import SegmentCheck
from headwater.check.report import INDEX, CheckReport, OnProgress, Problem, Progress
from headwater.check.staged import StagedCheck, list_staged
from headwater.check.tags import find_tag_faults
from headwater.errors import CorruptDataError, HeadwaterError, NotFoundError, TruncatedError, UnavailableError
from headwater.model.policies import Retention, Scaling
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.store import Store
from headwater.streams.lifecycle import INNER_KINDS, KINDS

_CATALOG = "the catalog"


def check_store(store: Store, on_progress: OnProgress | None = None, *, repair: bool = False) -> CheckReport:
    """Read and verify everything a store holds. What is wrong is in the report; an exception means that the check could not be done.

    `repair` rebuilds the indexes of journals that differ from their events, by a round of upkeep. Nothing else is changed.
    """
    engine = store._engine
    report = CheckReport()
    total = rows.count_bytes(engine.database)
    objects = SeenObjects(engine.storage)
    for stream in rows.list_stream_ids(engine.database):
        for name in _noting(report, f"stream {stream}", _check_stream(engine, stream, report, objects)):
            if on_progress is not None:
                on_progress(Progress(name, report.bytes, max(total, report.bytes)))
    for part in (_check_staged(engine, report, objects), *_check_rows(engine, report), _find_unused(engine, report, objects)):
        for _ in _noting(report, _CATALOG, part):
            pass
    if repair:
        _repair(store, report)
    if on_progress is not None:
        on_progress(Progress("", report.bytes, max(total, report.bytes)))
    return report


def _repair(store: Store, report: CheckReport) -> None:
    """Rebuild the indexes that have problems; those that are as they should be then are `repaired`."""
    engine = store._engine
    names = dict.fromkeys([problem.stream for problem in report.problems if problem.kind == INDEX and problem.stream is not None])
    refs = [store.stream(name)._ref for name in names]
    for ref in refs:
        engine.run(rebuilds.begin_repair, ref.id)
    if refs:
        store.run_upkeep()
    for ref in refs:
        if engine.run(journals.find_state, ref.id) == journals.READY and not find_index_faults(engine, ref):
            report.repair(ref.name)


def _noting(report: CheckReport, name: str, steps: Iterator[str]) -> Iterator[str]:
    """Take steps, each of which tells the name of what it is about. What damaged rows lead to is noted, and ends these steps only."""
    try:
        for name in steps:
            yield name
    except NotFoundError:
        pass  # Deleted meanwhile.
    except CorruptDataError as error:
        report.add(_catalog_problem(name, error.message, error.object))
    except HeadwaterError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        report.add(_catalog_problem(name, f"a value in its rows is not what it can be ({type(error).__name__}: {error})"))


def _catalog_problem(name: str, message: str, object: str | None = None) -> Problem:
    return Problem("catalog", f"{name}: {message}", name if name != _CATALOG else None, None, object)


def _check_rows(engine: Engine, report: CheckReport) -> Iterator[Iterator[str]]:
    for look in (*rows.LOOKS, find_tag_faults, find_lost_rows):
        yield _add_all(report, look(engine.database))


def _add_all(report: CheckReport, problems: Iterator[Problem]) -> Iterator[str]:
    for problem in problems:
        report.add(problem)
        yield _CATALOG


def _find_unused(engine: Engine, report: CheckReport, objects: SeenObjects) -> Iterator[str]:
    report.leftover_rows += rows.count_dead_rows(engine.database)
    for found in unused.find_unused(engine, objects.named, report):
        report.add_unused(found)
        yield _CATALOG


@operation("read")
def read_stream(tx: Tx, stream: int) -> tuple[StreamRow, list[SegmentRow], int]:
    next_segment = tx.run("SELECT next_segment FROM stream WHERE id = ?", (stream,))
    return streams.get_stream(tx, stream), segments.list_segments(tx, stream, with_dropped=True), next_segment[0][0] if next_segment else 0


def _check_stream(engine: Engine, stream: int, report: CheckReport, objects: SeenObjects) -> Iterator[str]:
    row, found, next_segment = engine.run(read_stream, stream)
    yield row.full_name
    # Segments that only a tag keeps are out of the lineage: their predecessors or successors may be gone.
    readable = [segment for segment in found if not segment.dropped]
    for fault in find_lineage_faults(readable, epoch=row.epoch, is_sealed=row.sealed_at is not None, next_segment=next_segment):
        report.add(Problem("lineage", f"{row.full_name}: {fault}", row.full_name))
    for fault in _find_row_faults(row):
        report.add(Problem("catalog", f"{row.full_name}: {fault}", row.full_name))
    ref = _find_ref(engine, row, report)
    for segment in found:
        if ref is not None:
            for _ in SegmentCheck(engine, ref, segment, report, objects).run():
                yield row.full_name
        report.segments += 1
    report.streams += 1
    if ref is not None and ref.kind == "journal":
        try:
            faults = find_index_faults(engine, ref)
        except (CorruptDataError, TruncatedError):
            return  # Damaged events are named by now, and what was truncated is not there.
        for fault in faults:
            report.add(Problem(INDEX, f"{row.full_name}: {fault}", row.full_name))


def _find_row_faults(row: StreamRow) -> Iterator[str]:
    if row.kind not in (*KINDS, *INNER_KINDS, FILLING):
        yield f"it is of the kind {row.kind!r}, which is none"
    for what, parse, text in (("scaling", Scaling.from_json, row.scaling), ("retention", Retention.from_json, row.retention)):
        try:
            parse(text)
        except (ValueError, TypeError, KeyError) as error:
            yield f"its {what} {text!r:.100} can't be read: {error}"


def _check_staged(engine: Engine, report: CheckReport, objects: SeenObjects) -> Iterator[str]:
    for transaction, stream, found in list_staged(engine):
        try:
            ref = engine.stream_ref(engine.run(streams.get_stream, stream))
        except UnavailableError:
            raise
        except Exception:  # Deleted meanwhile, or its schema can't be read, which is known by now.
            continue
        StagedCheck(engine, ref, transaction, report, objects).run(found)
        yield ref.name


def _find_ref(engine: Engine, row: StreamRow, report: CheckReport) -> StreamRef | None:
    try:
        return engine.stream_ref(row)
    except UnavailableError:
        raise
    except Exception as error:  # Whatever pyarrow makes of a damaged schema.
        engine.run(streams.get_stream, row.id)  # NotFoundError if it was deleted meanwhile.
        message = f"{row.full_name}: its schema (version {row.schema_version}) can't be read, so neither can its events: {error}"
        report.add(Problem("catalog", message, row.full_name))
        return None
