"""The options of source and sink: their names, their types, and one clear line for each mistake."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from headwater import Cut, InvalidRequestError
from headwater.spark.addresses import StoreAddress, read_address

_MIB = 1024 * 1024
_PLACE = {"store", "catalog", "path", "stream"}
_SOURCE = _PLACE | {
    "streams",
    "start",
    "end",
    "max_events_per_batch",
    "max_bytes_per_batch",
    "partition_bytes",
    "columns",
    "where",
    "group",
    "on_truncation",
    "headwater.ranges",
}
#: How `headwater.spark.transaction` has the sink stage rows for it.
_INNER = {"headwater.into", "headwater.label", "headwater.report", "headwater.hash", "headwater.require"}
_SINK = _PLACE | _INNER | {"key", "time", "table", "stream_column", "create", "segments", "lease", "on_rollback", "fingerprint"}
#: What Spark itself adds.
_SPARKS_OWN = {"checkpointlocation", "queryname", "outputmode"}


@dataclass(frozen=True)
class SourceOptions:
    """What a source was asked for."""

    address: StoreAddress
    streams: tuple[str, ...]
    start: str | datetime | Cut | None
    end: str | datetime | Cut | None
    max_events: int | None
    max_bytes: int | None
    partition_bytes: int
    columns: tuple[str, ...] | None
    where: str | None
    group: str | None
    skip_truncated: bool
    #: (segment, start, end) of the one stream, instead of what lies between two places.
    ranges: tuple[tuple[int, int, int], ...] | None = None


@dataclass(frozen=True)
class SinkOptions:
    """What a sink was asked for: one of `stream`, `stream_column` and `table` says where rows go."""

    address: StoreAddress
    stream: str | None
    stream_column: str | None
    table: str | None
    key: str | None
    time: str | None
    create: bool
    segments: int
    lease_seconds: float
    append_after_rollback: bool
    #: Where the query's checkpoint is, if that can be read here.
    checkpoint: Path | None
    hashes_rows: bool
    #: For a part of a larger commit: its name, the transaction that takes the rows, a file for its receipt and the rows' number and hash,
    #: and whether the hash is wanted.
    label: str | None = None
    into: str | None = None
    report: str | None = None
    hashes_part: bool = False
    #: (table, key, version): a commit is refused unless the entry is at that version.
    require: tuple[str, str, int] | None = None

    @property
    def target(self) -> str:
        """The sink's name among those of a query."""
        if self.label is not None:
            return self.label
        return f"table {self.table}" if self.table else f"column {self.stream_column}" if self.stream_column else str(self.stream)


def read_source_options(options: Mapping[str, str]) -> SourceOptions:
    _check_names(options, _SOURCE, "source")
    named = [options.get("stream", ""), *options.get("streams", "").split(",")]
    streams = tuple(dict.fromkeys(name.strip() for name in named if name.strip()))
    if not streams:
        raise InvalidRequestError("which stream? Give option('stream', 'scope/name'), or option('streams', 'a/x, b/y') for several")
    columns = options.get("columns")
    return SourceOptions(
        read_address(options),
        streams,
        _place(options.get("start"), "start"),
        _place(options.get("end"), "end"),
        _number(options, "max_events_per_batch"),
        _number(options, "max_bytes_per_batch"),
        _number(options, "partition_bytes") or 64 * _MIB,
        tuple(name.strip() for name in columns.split(",") if name.strip()) if columns else None,
        options.get("where") or None,
        options.get("group") or None,
        _choice(options, "on_truncation", "fail", "skip") == "skip",
        tuple(map(tuple, json.loads(options["headwater.ranges"]))) if options.get("headwater.ranges") else None,
    )


def read_sink_options(options: Mapping[str, str]) -> SinkOptions:
    _check_names(options, _SINK, "sink")
    targets = [name for name in ("stream", "stream_column", "table") if options.get(name)]
    if len(targets) != 1:
        given = " and ".join(targets) or "none of them"
        raise InvalidRequestError(
            f"where to? Give option('stream', 'scope/name'), or option('stream_column', ...), or option('table', ...): {given} was given"
        )
    if options.get("table") and not options.get("key"):
        raise InvalidRequestError("a table needs option('key', column): whose rows replace each other")
    if options.get("stream_column") and _choice(options, "create", "false", "true") == "true":
        raise InvalidRequestError("create is for one stream or table: make the streams that stream_column names before, and leave it out")
    checkpoint = find_local(options.get("checkpointlocation"))
    return SinkOptions(
        read_address(options),
        options.get("stream") or None,
        options.get("stream_column") or None,
        options.get("table") or None,
        options.get("key") or None,
        options.get("time") or None,
        _choice(options, "create", "false", "true") == "true",
        _number(options, "segments") or 1,
        float(_number(options, "lease") or 86400),
        _choice(options, "on_rollback", "fail", "append") == "append",
        checkpoint,
        _choice(options, "fingerprint", "offsets", "rows") == "rows" or checkpoint is None,
        options.get("headwater.label"),
        options.get("headwater.into"),
        options.get("headwater.report"),
        "headwater.hash" in options,
        tuple(json.loads(options["headwater.require"])) if options.get("headwater.require") else None,
    )


def find_local(path: str | None) -> Path | None:
    """Where a checkpoint's files can be read here; None if they can't. As Hadoop has it, nothing in a path is quoted."""
    scheme, colon, rest = (path or "").partition(":")
    if not path or not colon or "/" in scheme:
        return Path(path) if path else None
    if scheme.lower() != "file":
        return None
    return Path("/" + rest[2:].partition("/")[2] if rest.startswith("//") else rest)


def _check_names(options: Mapping[str, str], known: set[str], what: str) -> None:
    for name in options:
        if name not in known | _SPARKS_OWN and not name.startswith("storage."):
            shown = ", ".join(sorted(word for word in known if "." not in word))
            raise InvalidRequestError(f"the {what} has no option {name!r}; it has: {shown}, storage.*")


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None or text == "":
        return None
    try:
        number = int(float(text)) if "e" in text.lower() else int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise InvalidRequestError(f"option {name!r} is a whole number above 0, not {text!r}")
    return number


def _choice(options: Mapping[str, str], name: str, default: str, other: str) -> str:
    text = (options.get(name) or default).lower()
    if text not in (default, other):
        raise InvalidRequestError(f"option {name!r} is {default!r} or {other!r}, not {text!r}")
    return text


def _place(text: str | None, name: str) -> str | datetime | Cut | None:
    """head, tail, the text of a cut, or an ISO time (without a zone: UTC)."""
    if not text:
        return None
    if text in ("head", "tail"):
        return text
    if text.lstrip().startswith("{"):
        return Cut.parse(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(f"option {name!r} is head, tail, the text of a cut, or an ISO time, not {text!r}") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
