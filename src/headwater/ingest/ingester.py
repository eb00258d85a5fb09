"""Ingesting: files to transactions, until none is left, or for ever."""

from __future__ import annotations

import os
import time as clock
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import pyarrow as pa

import headwater as hw
from headwater.ingest.claim import Claim, Pause
from headwater.ingest.formats import Dialect, check_dialect
from headwater.ingest.pieces import Piece
from headwater.ingest.prefetch import prefetch
from headwater.ingest.reading import read_fingerprint, read_to_end
from headwater.ingest.record import Files, FileState
from headwater.ingest.sources import SourceFile, find_files
from headwater.ingest.spread import FileTask, Spread, drop_leftovers, groups, stage_file, write_piece
from headwater.ingest.streams import DeadLetters, Plan, find_stream_id, open_target, state_names
from headwater.ingest.target import Target
from headwater.ingest.todo import Todo

States = list[tuple[SourceFile, FileState]]

_LONGEST_POLL_SECONDS, _SHORTEST_POLL_SECONDS = 0.5, 0.05


@dataclass(frozen=True)
class FileDone:
    """A file that is stored as a whole."""

    path: str
    events: int
    bad_rows: int


@dataclass
class Progress:
    """How far a run is: `bytes` read, events committed, and the files `finished` since the last call."""

    files: int = 0
    files_done: int = 0
    bytes: int = 0
    bytes_done: int = 0
    events: int = 0
    bad_rows: int = 0
    transactions: int = 0
    finished: list[FileDone] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What a run stored. `files_before` were stored by earlier runs; `files_changed` changed since then, and were left alone."""

    stream: str
    files: int
    files_before: int
    files_changed: int
    events: int
    bad_rows: int
    bytes: int
    transactions: int
    seconds: float


def ingest(
    store: hw.Store,
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    stream: str,
    *,
    format: str | None = None,
    key: str | None = None,
    time: str | None = None,
    schema: pa.Schema | None = None,
    segments: int = 1,
    delimiter: str | None = None,
    header: bool = True,
    events_per_transaction: int | None = None,
    bad_rows: str | None = None,
    skip_changed: bool = False,
    watch: bool = False,
    settle: float = 1.0,
    name: str = "ingest",
    standby: bool = False,
    take_over: bool = False,
    lease: float = 30.0,
    spread: Spread | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
    notice: Callable[[str], None] = lambda text: None,
    pause: Pause = clock.sleep,
) -> Report:
    """Store the rows of files in a stream, each once, also if this is killed and run again, or run twice at the same time.

    A transaction is a file, or `events_per_transaction` rows of one or more. A stream that is missing is made, with `schema` or the one
    that the first file suggests. A row that is no event raises InvalidRequestError with path, place and reason as its `facts`, and nothing
    of its transaction is stored; with `bad_rows` it goes to that stream instead. A file that changed since it was stored is a
    ConflictError. Of two at the same time the second gets a ConflictError, or waits as `standby`; who was taken over gets a FencedError.
    With `watch` it goes on with files that arrive and were not touched for `settle` seconds. `spread` gives the files to tasks on other
    machines, which can read them too, and commits many files at once. `pause` is called often: what it raises ends the run in order.
    """
    if events_per_transaction is not None and (isinstance(events_per_transaction, bool) or events_per_transaction < 1):
        raise hw.InvalidRequestError(f"a transaction has at least one event, not {events_per_transaction!r}")
    if events_per_transaction is not None and spread is not None:
        raise hw.InvalidRequestError("tasks store whole files: leave out the number of events for a transaction")
    dialect = Dialect(delimiter, header)
    check_dialect(dialect)
    places = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    find_files(places, format, may_be_none=watch)  # so that a mistake shows before anything waits
    names = state_names(stream, name)
    letters = DeadLetters(store, bad_rows) if bad_rows is not None else None
    claim = Claim(store, names.record, lease)
    claim.take(standby=standby, take_over=take_over, pause=pause, notice=notice)
    try:
        todo = Todo(Files(store, names.files), skip_changed, settle if watch else None)
        plan = Plan(schema, segments, key, time, dialect)
        run = _Run(store, stream, plan, claim, todo, letters, events_per_transaction, spread, progress, pause)
        while True:
            run.round(find_files(places, format, may_be_none=watch))
            if not watch:
                return run.report()
            pause(min(_LONGEST_POLL_SECONDS, max(_SHORTEST_POLL_SECONDS, settle / 2)))
    finally:
        claim.release()


class _Run:
    """One run: the rounds over the files that there are, and what is staged in the open transaction."""

    def __init__(
        self,
        store: hw.Store,
        stream: str,
        plan: Plan,
        claim: Claim,
        todo: Todo,
        letters: DeadLetters | None,
        limit: int | None,
        spread: Spread | None,
        show: Callable[[Progress], None],
        pause: Pause,
    ) -> None:
        self._store = store
        self._stream = stream
        self._plan = plan
        self._claim = claim
        self._todo = todo
        self._letters = letters
        self._limit = limit
        self._spread = spread
        self._owner = f"ingest/{claim.name}"
        self._show = show
        self._pause = pause
        self._target: Target | None = None
        self._staged: dict[SourceFile, FileState] = {}
        self._staged_rows = 0
        self._staged_bytes = 0
        self._stored_bytes = 0
        self._progress = Progress()
        self._began = clock.monotonic()

    def report(self) -> Report:
        done, todo = self._progress, self._todo
        return Report(
            self._stream,
            done.files_done,
            todo.before,
            len(todo.changed),
            done.events,
            done.bad_rows,
            self._stored_bytes,
            done.transactions,
            clock.monotonic() - self._began,
        )

    def round(self, files: list[SourceFile]) -> None:
        """Store all that is not stored yet of these files."""
        book = self._todo.files
        while True:
            found = find_stream_id(self._store, self._stream)
            if found != book.stream:
                self._target = None
            book.stream = found
            states = self._todo.choose(files)
            if not states:
                return
            if self._target is None:
                self._target = open_target(self._store, self._stream, self._plan, [file for file, _ in states])
                book.stream = find_stream_id(self._store, self._stream)
            try:
                if self._spread is not None:
                    self._spread_out(self._spread, states, self._target)
                else:
                    self._ingest(states, self._target)
                return
            except (hw.TransactionEndedError, hw.ConditionFailedError):
                # Another took over, which ends this; or only the lease ran out, as when a laptop was asleep.
                self._claim.recover()
                self._forget_staged()
                self._todo.reload()

    def _expect(self, states: States) -> None:
        self._progress.files = self._progress.files_done + len(states)
        self._progress.bytes = self._stored_bytes + sum(state.stamp.size for _, state in states)

    def _ingest(self, states: States, target: Target | None) -> None:
        self._expect(states)
        current = dict(states)
        with closing(prefetch(self._read(states, target))) as items:
            for file, piece in items:
                self._pause(0.0)
                state = current[file]
                if isinstance(piece, str):
                    self._staged_bytes += state.stamp.size
                    self._stage(file, state._replace(position=None, fingerprint=piece), 0)
                    if self._limit is None:
                        self._commit()
                    continue
                rest: Piece | None = piece
                while rest is not None:
                    self._pause(0.0)
                    part, rest = rest.cut(self._limit - self._staged_rows) if self._limit is not None else (rest, None)
                    state = current[file] = write_piece(self._claim.tx, self._stream, file, state, part, self._letters)
                    self._stage(file, state, part.rows)
                    if self._limit is not None and self._staged_rows >= self._limit:
                        if state.fingerprint is None:
                            state = current[file] = state._replace(fingerprint=read_fingerprint(file, state))
                            self._stage(file, state, 0)
                        self._commit()
                self._progress.bytes_done = self._stored_bytes + self._staged_bytes + piece.read_bytes
                self._show(self._progress)
        if self._staged:
            self._commit()

    def _read(self, states: States, target: Target | None) -> Generator[tuple[SourceFile, Piece | str], None, None]:
        for file, state in states:
            if not self._todo.is_as_chosen(file, state):
                continue
            for item in read_to_end(file, state, target, self._plan.dialect, keep_bad=self._letters is not None):
                yield file, item

    def _spread_out(self, spread: Spread, states: States, target: Target | None) -> None:
        """The same by tasks elsewhere, many files in one commit."""
        self._expect(states)
        drop_leftovers(self._store, self._owner)
        for chosen in groups(states):
            self._pause(0.0)
            group = [(file, state) for file, state in chosen if self._todo.is_as_chosen(file, state)]
            tasks = [
                FileTask(self._store, self._stream, self._owner, file, state, target, self._plan.dialect, self._letters)
                for file, state in group
            ]
            results = list(zip(group, spread(stage_file, tasks), strict=True))
            failed = next((index for index, (_, result) in enumerate(results) if result.error is not None), len(results))
            good = results[:failed]
            self._claim.tx.adopt([result.receipt for _, result in good if result.receipt is not None])
            for (file, state), result in good:
                self._stage(file, result.state, 0)
                self._staged_bytes += state.stamp.size
            if good:
                self._commit()
            drop_leftovers(self._store, self._owner)
            if failed < len(results):
                error = results[failed][1].error
                assert error is not None
                raise error

    def _stage(self, file: SourceFile, state: FileState, rows: int) -> None:
        self._staged[file] = state
        self._staged_rows += rows

    def _forget_staged(self) -> None:
        self._staged.clear()
        self._staged_rows = self._staged_bytes = 0

    def _commit(self) -> None:
        files, progress = self._todo.files, self._progress
        for file, state in self._staged.items():
            files.stage(self._claim.tx, file, state)
        self._claim.commit()
        for file, state in self._staged.items():
            before = files.find(file)
            progress.events += state.events - (before.events if before is not None else 0)
            progress.bad_rows += state.bad_rows - (before.bad_rows if before is not None else 0)
            files.committed(file, state)
            if state.position is None:
                progress.finished.append(FileDone(file.path, state.events, state.bad_rows))
                progress.files_done += 1
        self._stored_bytes += self._staged_bytes
        progress.bytes_done = max(progress.bytes_done, self._stored_bytes)
        progress.transactions += 1
        self._forget_staged()
        self._show(progress)
        progress.finished.clear()
