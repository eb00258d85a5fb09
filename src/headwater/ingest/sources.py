"""Which files there are to ingest, what is in them, and how to tell that one changed.

A file is known by its absolute path. Its size and time of modification say quickly that it is still the same, a hash of its bytes for sure.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import xxhash

from headwater.errors import InvalidRequestError, NotFoundError, UnavailableError

FORMATS = ("csv", "tsv", "jsonl", "lines", "parquet", "avro")
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "lines",
    ".log": "lines",
    ".parquet": "parquet",
    ".avro": "avro",
}
_CODECS = {".gz": "gzip", ".zst": "zstd"}
#: Their bytes are no text that could have been compressed as a whole.
_CONTAINERS = ("parquet", "avro")
_HASH_PIECE_BYTES = 1024 * 1024


class Stamp(NamedTuple):
    """What a look into the folder tells of a file."""

    size: int
    modified_ns: int


class SourceFile(NamedTuple):
    """A file to ingest: `codec` is None if it is not compressed."""

    path: str
    format: str
    codec: str | None

    @property
    def key(self) -> str:
        """The path as the key of a table; names that are no text are kept apart by escapes."""
        return os.fsencode(self.path).decode("utf-8", "backslashreplace")

    def stamp(self) -> Stamp:
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return Stamp(found.st_size, found.st_mtime_ns)

    def fingerprint(self) -> str:
        """A hash of all bytes."""
        state = xxhash.xxh3_128()
        try:
            with open(self.path, "rb", buffering=0) as file:
                while piece := file.read(_HASH_PIECE_BYTES):
                    state.update(piece)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return state.hexdigest()

    def open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise unreadable(self.path, error) from error


def unreadable(path: str, error: Exception) -> UnavailableError:
    """What to say of a file that can't be read, or not to its end."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UnavailableError(f"{path} can't be read: {reason}", path=path)


def naming(path: str, error: InvalidRequestError) -> InvalidRequestError:
    """The same error, with the file's name in it."""
    return error if path in error.message else InvalidRequestError(f"{path}: {error.message}", path=path)


def find_files(sources: Sequence[str | os.PathLike[str]], format: str | None, *, may_be_none: bool = False) -> list[SourceFile]:
    """The files that `sources` name, by path: files, folders with all in them, and patterns like 'in/**/*.csv'.

    Names that begin with . or _ are left out of folders: those are other programs' notes. `may_be_none`: a pattern may find nothing yet.
    """
    if not sources:
        raise InvalidRequestError("which files? Give files, folders or patterns")
    if format is not None and format not in FORMATS:
        raise InvalidRequestError(f"no format is called {format!r}; there are {', '.join(FORMATS)}")
    paths: set[str] = set()
    for source in sources:
        text = os.path.abspath(os.fspath(source))
        if os.path.isdir(text):
            paths.update(_walk(text))
        elif os.path.exists(text):
            paths.add(_checked(text))
        elif glob.has_magic(text):
            found = [
                path for match in glob.glob(text, recursive=True) for path in (_walk(match) if os.path.isdir(match) else (_checked(match),))
            ]
            if not found and not may_be_none:
                raise NotFoundError(f"no file matches {os.fspath(source)}")
            paths.update(found)
        else:
            raise NotFoundError(f"there is no file or folder {text}")
    return [_recognize(path, format) for path in sorted(paths)]


def _walk(folder: str) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename or folder, error)

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in names:
            path = os.path.join(place, name)
            if not name.startswith((".", "_")) and os.path.isfile(path):
                yield path


def _checked(path: str) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise InvalidRequestError(f"{path} is no file that can be read again from its start: send it to `headwater write`")
    return path


def _recognize(path: str, format: str | None) -> SourceFile:
    root, suffix = os.path.splitext(path)
    codec = _CODECS.get(suffix.lower())
    if codec is not None:
        suffix = os.path.splitext(root)[1]
    found = format or _SUFFIXES.get(suffix.lower())
    if found is None:
        raise InvalidRequestError(f"{path}: its name does not say what is in it: give a format ({', '.join(FORMATS)}), or a pattern")
    if codec is not None and found in _CONTAINERS:
        raise InvalidRequestError(f"{path}: {found} files are compressed inside, not as a whole")
    return SourceFile(path, found, codec)
