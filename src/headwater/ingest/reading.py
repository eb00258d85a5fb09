"""A whole file from where it is stored to its end, read without being changed meanwhile, with errors that name it."""

from __future__ import annotations

from collections.abc import Generator

import headwater as hw
from headwater.ingest.formats import Dialect, read_file
from headwater.ingest.pieces import BadRowError, Piece, Position
from headwater.ingest.record import FileState
from headwater.ingest.sources import SourceFile, naming
from headwater.ingest.target import Target
from headwater.ingest.todo import changed


def read_to_end(
    file: SourceFile, state: FileState, target: Target | None, dialect: Dialect, *, keep_bad: bool
) -> Generator[Piece | str, None, None]:
    """The pieces that are not stored yet, and at last what all bytes of the file were. Without a target there are no pieces."""
    try:
        if target is not None:
            yield from read_file(file, state.position or Position(), target, dialect, keep_bad=keep_bad)
    except BadRowError as error:
        row = error.row
        raise hw.InvalidRequestError(
            f"{file.path}, {row.place}: {row.reason}", path=file.path, place=row.place, reason=row.reason, text=row.text
        ) from error
    except hw.InvalidRequestError as error:
        raise naming(file.path, error) from None
    yield read_fingerprint(file, state)


def read_fingerprint(file: SourceFile, state: FileState) -> str:
    """What all bytes of a file are, if it was not changed since it was chosen; else ConflictError."""
    fingerprint = file.fingerprint()
    if file.stamp() != state.stamp:
        raise changed(file, state._replace(fingerprint=None), "while it was read")
    return fingerprint
