"""How far a running query is behind its streams."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from headwater import Cut, InvalidRequestError, Lag, SegmentRange, Store
from headwater.spark.addresses import address_of, read_address


def lag(query: StreamingQuery, store: Store | str | os.PathLike[str] | None = None) -> Lag:
    """What the query has still to read: events and about how many bytes, and the age of the oldest of them in seconds.

    By its last progress, against the tails as of now. `store` is needed only where Spark does not tell which one is read.
    """
    progress = query.lastProgress
    sources: list[dict[str, Any]] = json.loads(progress.json)["sources"] if progress is not None else []
    cuts = [Cut.parse(json.dumps(end)) for source in sources if (end := source.get("endOffset")) and _is_cut(end)]
    if not cuts:
        raise InvalidRequestError("this query has not read from headwater yet: ask again after its first batch")
    stores = {found.id: found for found in _stores(query, store)}
    ranges: list[SegmentRange] = []
    for cut in cuts:
        if cut.store not in stores:
            raise InvalidRequestError(f"the query reads the store {cut.store}: give it as `store`")
        for name in cut.streams:
            ranges += stores[cut.store].stream(name).ranges(cut, skip_truncated=True)
    oldest = min((time for part in ranges if (time := _appended(part)) is not None), default=None)
    seconds = max(0.0, (datetime.now(UTC) - oldest).total_seconds()) if oldest is not None else 0.0
    return Lag(sum(part.count for part in ranges), sum(part.bytes for part in ranges), seconds)


def _is_cut(offset: Any) -> bool:
    return isinstance(offset, dict) and "store" in offset and "streams" in offset


def _stores(query: StreamingQuery, store: Store | str | os.PathLike[str] | None) -> Iterator[Store]:
    if store is not None:
        yield store if isinstance(store, Store) else address_of(store).open()
        return
    running: Any = query
    found: list[dict[str, str]] = []
    # Spark has no public way to ask, and this one may be gone in any version. A leaf may be another thing than a source.
    with suppress(Exception):
        leaves = running._jsq.streamingQuery().logicalPlan().collectLeaves()
        for index in range(leaves.size()):
            with suppress(Exception):
                found.append(dict(leaves.apply(index).relation().options().asCaseSensitiveMap()))
    for options in found or [{}]:
        lowered = {name.lower(): text for name, text in options.items()}
        if "store" in lowered or "path" in lowered or "HEADWATER_STORE" in os.environ:
            yield read_address(lowered).open()


def _appended(part: SegmentRange) -> datetime | None:
    """When the first event of a range was appended."""
    for batch in replace(part, end=part.start + 1).to_batches(["_appended"]):
        found: datetime = batch.column(0)[0].as_py()
        return found
    return None
