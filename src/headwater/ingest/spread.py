"""Many files at once, on many machines: each is read and staged by a task, and one commit takes what the tasks staged.

Every attempt of a task has a transaction of its own. The one that commits adopts those it was told of, in the order of the files; what
other attempts staged is dropped. So a task that failed, ran twice or was given up and went on leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import headwater as hw
from headwater.ingest.formats import Dialect
from headwater.ingest.pieces import Piece
from headwater.ingest.reading import read_to_end
from headwater.ingest.record import FileState
from headwater.ingest.sources import SourceFile, naming
from headwater.ingest.streams import DeadLetters
from headwater.ingest.target import Target

#: What a task staged waits for the last of its group, and for a driver that is slow.
_LEASE_SECONDS = 24 * 3600.0
#: One commit takes up to so much.
_GROUP_BYTES = 4 * 1024**3
_GROUP_FILES = 256


class FileTask(NamedTuple):
    """A file to stage, in whatever process."""

    store: hw.Store
    stream: str
    owner: str
    file: SourceFile
    state: FileState
    target: Target | None
    dialect: Dialect
    letters: DeadLetters | None


class StagedFile(NamedTuple):
    """What a task tells: its transaction's receipt and how far the file is stored when that is committed, or what went wrong."""

    receipt: str | None
    state: FileState
    error: hw.HeadwaterError | None = None


#: Calls a function for each item, on other machines if need be, and returns the results in the order of the items.
Spread = Callable[[Callable[[FileTask], StagedFile], Sequence[FileTask]], Sequence[StagedFile]]


def groups(states: Sequence[tuple[SourceFile, FileState]]) -> list[list[tuple[SourceFile, FileState]]]:
    """Files in order, as many at a time as one commit takes."""
    found: list[list[tuple[SourceFile, FileState]]] = []
    size = 0
    for file, state in states:
        if not found or size + state.stamp.size > _GROUP_BYTES or len(found[-1]) >= _GROUP_FILES:
            found.append([])
            size = 0
        found[-1].append((file, state))
        size += state.stamp.size
    return found


def stage_file(task: FileTask) -> StagedFile:
    """Run by a task: read a file to its end and stage its rows. What is wrong with the file is told; anything else is raised."""
    tx = task.store.transaction(lease=_LEASE_SECONDS, auto_renew=False, marker=hw.Marker(task.owner, 0))
    state = task.state
    try:
        for item in read_to_end(task.file, state, task.target, task.dialect, keep_bad=task.letters is not None):
            if isinstance(item, Piece):
                state = write_piece(tx, task.stream, task.file, state, item, task.letters)
            else:
                state = state._replace(position=None, fingerprint=item)
        tx.flush()
    except BaseException as error:
        tx.abort()
        if isinstance(error, hw.UnavailableError | hw.InvalidRequestError | hw.ConflictError):
            return StagedFile(None, task.state, error)
        raise
    return StagedFile(tx.receipt, state)


def write_piece(
    tx: hw.Transaction, stream: str, file: SourceFile, state: FileState, piece: Piece, letters: DeadLetters | None
) -> FileState:
    """Add a piece to a transaction; how far the file is stored when that is committed."""
    if piece.batch.num_rows:
        try:
            # The stream may have got a nullable column since the file was begun.
            tx.write_batch(stream, piece.batch, missing="null")
        except hw.InvalidRequestError as error:
            raise naming(file.path, error) from None
    for row in piece.bad:
        assert letters is not None, "bad rows are kept only for them"
        letters.write(tx, file, row)
    return state._replace(events=state.events + piece.batch.num_rows, bad_rows=state.bad_rows + len(piece.bad), position=piece.end)


def drop_leftovers(store: hw.Store, owner: str) -> None:
    """Abort what task attempts staged that nobody was told of, and nobody will commit."""
    for info in store.transactions(100_000, only_open=True):
        if info.marker is not None and info.marker.owner == owner:
            try:
                store.resume_transaction(info.id).abort()
            except (hw.TransactionEndedError, hw.NotFoundError):
                continue
