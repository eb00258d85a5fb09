"""A stream as a pyarrow Dataset: its chunks are Parquet fragments, and what lies in no chunk yet is read by number when it is asked for.

The dataset holds what it names: nothing of it is truncated or put into other chunks while it is open. All reading opens files here, so a
dataset whose hold has ended raises, and never finds a file missing or other events in it.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from headwater.errors import CorruptDataError, HeadwaterError, InvalidRequestError, UnavailableError
from headwater.model.cuts import Cut
from headwater.model.limits import MIB
from headwater.model.schemas import widens
from headwater.runtime.heart import Heart
from headwater.segments.batches import Columns, check_columns
from headwater.segments.engine import Engine
from headwater.segments.lanes import StreamRef
from headwater.streams import cuts, forks, reading
from headwater.streams.cuts import Place
from headwater.streams.lifecycle import current_row

_HOLD_SECONDS = 600.0
#: What lies in no chunk is cut into files of about this size; the last few that were made are kept, since Arrow opens each several times.
_PIECE_BYTES = 16 * MIB
_KEPT_PIECES = 4
_CHUNKS = "chunks/"
_EXTRA = ("_key", "_time", "_number")


class StreamDataset(ds.UnionDataset):  # type: ignore[misc]
    """A pyarrow Dataset over a stream's history and tail. Close it, or use it in a with block: while it is open it holds what it names."""

    def __init__(self, schema: pa.Schema, children: list[ds.Dataset], files: _Files) -> None:
        super().__init__(schema, children)
        self._files = files

    @property
    def schema(self) -> pa.Schema:
        """The columns of the stream, then `_key`, `_time`, `_segment` and `_number`."""
        # Whoever begins to read asks for this first: DuckDB would wait forever for a file that can't be opened.
        self._files.check()
        return super().schema

    def scanner(self, *args: Any, **options: Any) -> ds.Scanner:
        """Begin to read, with one thread unless `use_threads=True` is given. InvalidRequestError if the dataset or its store was closed.

        DuckDB reads by `to_reader` of a scanner, which pyarrow begins without releasing the interpreter's lock. A thread of that scan may
        then wait for this lock, to open a file here, while it holds a lock of Arrow's that the beginning waits for.
        """
        self._files.check()
        options.setdefault("use_threads", False)
        return super().scanner(*args, **options)

    def close(self) -> None:
        """End the hold: the dataset can't be read any more. Closing again does nothing."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Files(fs.FileSystemHandler):  # type: ignore[misc]
    """The files of one dataset, and the hold that keeps them, for as long as anything may read them."""

    def __init__(self, engine: Engine, stream: StreamRef, start: Cut | None, end: Cut) -> None:
        self._engine = engine
        self.stream = stream
        self._held = (start, end)
        self._name = f"dataset-{uuid.uuid4().hex}"
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._pieces: OrderedDict[str, pa.Buffer] = OrderedDict()
        self._is_closed = False
        self._hold()

    def _hold(self) -> None:
        forks.hold(self._engine, self._name, *self._held, _HOLD_SECONDS)

    def renew(self) -> bool:
        """For the heart: hold on for another while. False if there is no more reason to."""
        if self._is_closed or self._engine.is_closed:
            return False
        with suppress(HeadwaterError):
            self._hold()
        return True

    def check(self) -> None:
        if self._engine.is_closed:
            raise InvalidRequestError(f"the store of this dataset of {self.stream.name} was closed: open it, and call dataset() again")
        if self._is_closed:
            raise InvalidRequestError(f"this dataset of {self.stream.name} was closed: call dataset() again")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pieces.clear()
            if self._process == os.getpid() and not self._engine.is_closed:
                self._engine.end_hold(self._name)

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):
            self.close()

    # What Arrow asks for.

    def open_input_file(self, path: str) -> pa.NativeFile:
        self.check()
        try:
            return self._open_chunk(path.removeprefix(_CHUNKS)) if path.startswith(_CHUNKS) else pa.BufferReader(self._piece(path))
        except HeadwaterError:
            self.check()  # it may have been closed meanwhile
            raise

    def _open_chunk(self, key: str) -> pa.NativeFile:
        storage = self._engine.storage
        if storage.url.startswith("file://"):
            with suppress(FileNotFoundError):
                return pa.OSFile(os.path.join(storage.url.removeprefix("file://"), key))
        elif (size := storage.size(key)) is not None:
            return pa.PythonFile(_Object(self, key, size), mode="r")
        raise self._replaced()

    def _replaced(self) -> UnavailableError:
        return UnavailableError(
            f"the hold of this dataset of {self.stream.name} has ended, and its files were replaced: call dataset() again"
        )

    def get(self, key: str, start: int, length: int) -> Any:
        """Some bytes of a chunk in an object store."""
        storage = self._engine.storage
        try:
            return storage.get(key, start, length)
        except CorruptDataError:
            if storage.size(key) is not None:
                raise
            self.check()
            raise self._replaced() from None

    def _piece(self, path: str) -> pa.Buffer:
        """The events of `segment/start/end` as an Arrow file."""
        with self._lock:
            found = self._pieces.get(path)
        if found is None:
            segment, start, end = map(int, path.split("/"))
            columns = Columns([*self.stream.schema.names, *_EXTRA])
            cursor = self._engine.cursor(self.stream, segment, start, end, columns.names, keeps_schema=True)
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, columns.schema_for(self.stream)) as writer:
                while (batch := reading.next_batch(self._engine, self.stream, cursor)) is not None:
                    writer.write_batch(batch.to_arrow(columns))
            found = sink.getvalue()
            with self._lock:
                self._pieces[path] = found
                while len(self._pieces) > _KEPT_PIECES:
                    self._pieces.popitem(last=False)
        return found

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def get_type_name(self) -> str:
        return "headwater"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [fs.FileInfo(path, fs.FileType.File) for path in paths]

    def _refuse(self, *_: object) -> Any:
        raise InvalidRequestError("a stream is not written by way of its dataset")

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refuse


class _Object:
    """An object of a storage as a file."""

    closed = False

    def __init__(self, files: _Files, key: str, size: int) -> None:
        self._files = files
        self._key = key
        self._size = size
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset if whence == 0 else self._at + offset if whence == 1 else self._size + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, length: int = -1) -> Any:
        wanted = self._size - self._at if length < 0 else min(length, self._size - self._at)
        if not wanted:
            return b""
        data = self._files.get(self._key, self._at, wanted)
        self._at += wanted
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def open_dataset(engine: Engine, heart: Heart, stream: StreamRef, start: Place, end: Place) -> StreamDataset:
    """What lies between two places. TruncatedError if some of it is gone."""
    first = None if start in (None, "head") else _cut(engine, stream, start)
    files = _Files(engine, stream, first, _cut(engine, stream, "tail" if end is None else end))
    try:
        heart.add(files.renew, _HOLD_SECONDS / 4)
        found = cuts.ranges(engine, stream, first, files._held[1])
        # The schema as of now has all that those events have.
        files.stream = stream = engine.stream_ref(current_row(engine, stream))
        system = fs.PyFileSystem(files)
        parquet = ds.ParquetFileFormat(
            default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=True)
        )
        schema = Columns(check_columns(stream, None)).schema_for(stream)
        fragments: tuple[list[ds.Fragment], list[ds.Fragment]] = ([], [])
        for item, size in zip(found, cuts.estimate_bytes(engine, stream, found), strict=True):
            for fragment in _fragments(engine, stream, parquet, system, item, size):
                fragments[isinstance(fragment, ds.ParquetFileFragment)].append(fragment)
        children = [
            ds.FileSystemDataset(some, schema, kind, filesystem=system)
            for some, kind in zip(fragments, (ds.IpcFileFormat(), parquet), strict=True)
        ]
        return StreamDataset(schema, children[::-1], files)
    except BaseException:
        files.close()
        raise


def _cut(engine: Engine, stream: StreamRef, place: Place) -> Cut:
    """A place as a cut of this stream alone."""
    if place == "tail":
        return cuts.tail(engine, [stream])
    if place == "head":
        return cuts.head(engine, stream)
    cut = cuts.fix(engine, stream, place)
    cuts.check_cut(cut)
    assert isinstance(cut, Cut)
    return Cut(cut.store, {name: part for name, part in cut.streams.items() if name == stream.name} or cut.streams)


def _fragments(
    engine: Engine, stream: StreamRef, parquet: ds.ParquetFileFormat, system: fs.FileSystem, item: cuts.Range, size: int
) -> Iterator[ds.Fragment]:
    """A range of a segment: the row groups that lie in it as a whole, and by number what lies between them."""
    segment, at = item.segment.number, item.start
    known = ds.field("_segment") == segment
    average = max(size // (item.end - item.start), 1)
    for place in engine.list_chunks(stream, segment, item.start, item.end):
        key = place.url.removeprefix(f"{engine.storage.url}/")
        fragment = parquet.make_fragment(f"{_CHUNKS}{key}", system, partition_expression=known)
        if place.is_own and at <= place.first and place.end <= item.end:
            # All of it, in a schema that widened to today's: a scan reads the footer, beside those of other chunks.
            yield from _pieces(system, segment, at, place.first, average, known)
            yield fragment
            at = place.end
            continue
        if not _may_read(fragment.physical_schema, stream.schema):
            continue
        groups, number = [], place.first
        low, high = max(at, item.start), min(place.end, item.end)
        bounds = []
        for index in range(fragment.metadata.num_row_groups):
            until = number + fragment.metadata.row_group(index).num_rows
            if low <= number and until <= high:
                groups.append(index)
                bounds += [number, until]
            number = until
        if groups:
            yield from _pieces(system, segment, at, bounds[0], average, known)
            is_whole = len(groups) == fragment.metadata.num_row_groups
            yield fragment if is_whole else fragment.subset(row_group_ids=groups)
            at = bounds[-1]
    yield from _pieces(system, segment, at, item.end, average, known)


def _may_read(stored: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether Arrow makes the stream's columns of a file's: a fork's parent may have added other columns of the same names."""
    both = [(stored.field(field.name).type, field.type) for field in wanted if stored.get_field_index(field.name) >= 0]
    return all(widens(old, new) for old, new in both)


def _pieces(system: fs.FileSystem, segment: int, start: int, end: int, average: int, known: ds.Expression) -> Iterator[ds.Fragment]:
    step = max(_PIECE_BYTES // average, 1)
    for first in range(start, end, step):
        path = f"{segment}/{first}/{min(first + step, end)}"
        yield ds.IpcFileFormat().make_fragment(path, system, partition_expression=known)


__all__ = ["StreamDataset", "open_dataset"]
