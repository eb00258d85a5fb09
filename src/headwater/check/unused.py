"""Bytes in storage that are no data: garbage, left by crashes, truncation and deletion, until upkeep collects it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from headwater.check.report import CheckReport, Unused
from headwater.segments.engine import Engine
from headwater.storage import layout

_SLICE_OBJECTS = 500
_PREFIXES = (layout.JOURNAL_PREFIX, layout.OBJECT_PREFIX, layout.CHUNK_PREFIX, layout.TRANSACTION_PREFIX)


def find_unused(engine: Engine, named: set[int], report: CheckReport) -> Iterator[Unused]:
    """Objects that nothing needs. `named` are those that extents name; a live session's objects may be on their way to be named."""
    named = named | {row[0] for row in engine.database.query("SELECT DISTINCT object FROM txn_extent WHERE object IS NOT NULL")}
    live = {row[0] for row in engine.database.query("SELECT id FROM session WHERE live = 1")}
    for prefix in _PREFIXES:
        listing = engine.storage.list(prefix)
        while page := list(islice(listing, _SLICE_OBJECTS)):
            report.objects += len(page)
            known = _known_objects(engine, [info.key for info in page])
            for info in page:
                session = layout.parse_key(info.key)
                if known.get(info.key) in named or (session is not None and session.session in live):
                    continue
                reason = "no row names it" if info.key not in known else "no block of it is in use"
                yield Unused(info.key, info.bytes, reason)
    if engine.storage.local:
        for info in engine.storage.list(layout.TEMPORARY_PREFIX):
            yield Unused(info.key, info.bytes, "it was not finished, or is being written now")


def _known_objects(engine: Engine, keys: list[str]) -> dict[str, int]:
    """Which of these keys have a row, and that row's id."""
    parsed = [layout.parse_key(key) for key in keys]
    ids = [layout.object_id(found.session, found.index) for found in parsed if found is not None]
    # Only staged objects, whose ids are negative, have keys that tell no id; the catalog has an index of these keys.
    others = [key for key, found in zip(keys, parsed, strict=True) if found is None]
    known: dict[str, int] = {}
    for condition, values in (("id", ids), ("id < 0 AND key", others)):
        if values:
            known.update(engine.database.query(f"SELECT key, id FROM object WHERE {condition} IN ({', '.join('?' * len(values))})", values))
    return known
