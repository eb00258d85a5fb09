"""Ingestion goes on where it ended, tells files that changed, and lets only one at a time commit."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headwater as hw
from headwater.ingest import Progress, Report, claim, ingest
from headwater.ingest.formats import read_file
from headwater.ingest.pieces import Piece

STREAM = "a/lines"
PATIENCE_SECONDS = 60.0


@pytest.fixture
def quick() -> Iterator[hw.Store]:
    """A store for what no catalog has a say in."""
    with hw.open(f"memory://{uuid.uuid4().hex}", upkeep=False) as store:
        yield store


class Ended(Exception):
    """As if the user had pressed Ctrl-C."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        write(folder, number)
    return folder


def write(folder: Path, number: int, lines: int = 10) -> Path:
    path = folder / f"{number}.txt"
    path.write_text("".join(f"{number}/{line}\n" for line in range(lines)))
    return path


def stored(store: hw.Store) -> list[str]:
    return [event.value.decode() for event in store.stream(STREAM).read()] if STREAM in store.streams() else []


def expected(folder: Path) -> list[str]:
    return [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def end_after(events: int) -> tuple[Callable[[Progress], None], Callable[[float], None]]:
    """For `progress` and `pause`: end the run once so many events are stored."""
    seen = Progress()

    def progress(now: Progress) -> None:
        seen.events = now.events

    def pause(seconds: float) -> None:
        if seen.events >= events:
            raise Ended

    return progress, pause


def test_a_run_that_is_ended_goes_on_where_it_was(store: hw.Store, folder: Path) -> None:
    progress, pause = end_after(14)
    with pytest.raises(Ended):
        ingest(store, folder, STREAM, events_per_transaction=7, progress=progress, pause=pause)
    assert stored(store) == expected(folder)[:14]
    assert not store.transactions(only_open=True)
    report = ingest(store, folder, STREAM, events_per_transaction=7)
    assert stored(store) == expected(folder)
    assert (report.events, report.files, report.files_before, report.transactions) == (16, 2, 1, 3)


def test_a_run_shows_no_transaction_but_those_that_stored_something(store: hw.Store, folder: Path) -> None:
    for _ in range(2):  # the second run finds nothing to do
        ingest(store, folder, STREAM)
        assert {info.status for info in store.transactions()} == {hw.TransactionStatus.COMMITTED}
    with store.transaction() as tx:
        tx.write(STREAM, b"x")
        tx.flush()
        tx.abort()
    with store.transaction(marker=hw.Marker("me", 1)) as marked:
        marked.renew()
        marked.abort()
    shown = [info.id for info in store.transactions() if info.status is hw.TransactionStatus.ABORTED]
    assert sorted(shown) == sorted([tx.id, marked.id])


@pytest.mark.parametrize("events", [2, 4, 6, 8])
def test_it_goes_on_in_the_middle_of_a_file(quick: hw.Store, folder: Path, events: int) -> None:
    progress, pause = end_after(events)
    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, events_per_transaction=2, progress=progress, pause=pause)
    assert stored(quick) == expected(folder)[:events]
    ingest(quick, folder, STREAM)
    assert stored(quick) == expected(folder)


def test_a_file_is_one_transaction_and_many_small_ones_can_share_one(quick: hw.Store, folder: Path) -> None:
    assert ingest(quick, folder, STREAM).transactions == 3
    assert ingest(quick, folder, "a/packed", events_per_transaction=1000).transactions == 1
    seen = [event.value.decode() for event in quick.stream("a/packed").read()]
    assert seen == expected(folder)


def test_two_names_know_nothing_of_each_other(quick: hw.Store, folder: Path) -> None:
    ingest(quick, folder, STREAM)
    assert ingest(quick, folder, STREAM, name="again").events == 30
    assert stored(quick) == [*expected(folder), *expected(folder)]


def test_progress_tells_files_bytes_and_events(quick: hw.Store, folder: Path) -> None:
    seen: list[tuple[int, int, list[str]]] = []
    ingest(quick, folder, STREAM, progress=lambda now: seen.append((now.files_done, now.events, [done.path for done in now.finished])))
    assert [item for item in seen if item[2]] == [(n + 1, 10 * n + 10, [str(folder / f"{n}.txt")]) for n in range(3)]


# Files that change.


def test_a_file_that_changed_after_it_was_ingested_is_an_error_that_says_so(store: hw.Store, folder: Path) -> None:
    ingest(store, folder, STREAM)
    with (folder / "1.txt").open("a") as file:
        file.write("more\n")
    write(folder, 3)
    with pytest.raises(
        hw.ConflictError, match=r"1\.txt changed after it was ingested: it had 40 bytes and has 45; 10 events of it are stored"
    ):
        ingest(store, folder, STREAM)
    assert len(stored(store)) == 30
    report = ingest(store, folder, STREAM, skip_changed=True)
    assert (report.files, report.files_before, report.files_changed) == (1, 2, 1) and len(stored(store)) == 40


def test_the_same_size_with_other_bytes_is_a_change_and_a_copy_is_none(quick: hw.Store, folder: Path) -> None:
    ingest(quick, folder, STREAM)
    path = folder / "1.txt"
    os.utime(path, (1, 1))
    assert ingest(quick, folder, STREAM).files_before == 3
    path.write_text(path.read_text().replace("1/3", "x/3"))
    os.utime(path, (2, 2))
    with pytest.raises(hw.ConflictError, match="changed after it was ingested: it has other bytes"):
        ingest(quick, folder, STREAM)


@pytest.mark.parametrize("lines", [5, 20])
def test_a_file_that_is_stored_in_part_may_neither_shrink_nor_grow(quick: hw.Store, folder: Path, lines: int) -> None:
    progress, pause = end_after(12)
    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, events_per_transaction=6, progress=progress, pause=pause)
    write(folder, 1, lines)
    with pytest.raises(hw.ConflictError, match=r"1\.txt changed after .* 2 events of it are stored"):
        ingest(quick, folder, STREAM, events_per_transaction=6)
    assert stored(quick) == [*(f"0/{line}" for line in range(10)), "1/0", "1/1"]


def test_a_file_that_is_stored_in_part_and_touched_is_still_the_same(quick: hw.Store, folder: Path) -> None:
    progress, pause = end_after(12)
    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, events_per_transaction=6, progress=progress, pause=pause)
    os.utime(folder / "1.txt", (1, 1))
    progress, pause = end_after(6)
    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, events_per_transaction=6, progress=progress, pause=pause)
    text = (folder / "1.txt").read_text()
    (folder / "1.txt").write_text(text.replace("1/9", "x/9"))
    with pytest.raises(hw.ConflictError, match="it has other bytes; 8 events of it are stored"):
        ingest(quick, folder, STREAM)
    (folder / "1.txt").write_text(text)
    ingest(quick, folder, STREAM)
    assert stored(quick) == expected(folder)


def do_at_first(action: Callable[[], object], polls: int = 3) -> Callable[[float], None]:
    """For `pause`: do something while the first file is stored; end a watch after so many looks."""
    calls = looks = 0

    def pause(seconds: float) -> None:
        nonlocal calls, looks
        calls, looks = calls + 1, looks + (seconds > 0)
        if calls == 1:
            action()
        if looks > polls:
            raise Ended

    return pause


@pytest.fixture
def many(folder: Path) -> Path:
    """More files than are read ahead."""
    for number in range(3, 10):
        write(folder, number)
    return folder


def test_files_that_change_before_it_is_their_turn_are_left_alone_if_asked_for(quick: hw.Store, many: Path) -> None:
    before = expected(many)
    report = ingest(quick, many, STREAM, skip_changed=True, pause=do_at_first(lambda: write(many, 9, 11)))
    assert (report.files, report.files_changed) == (9, 1) and stored(quick) == before[:90]


def test_files_that_go_or_change_before_it_is_their_turn_do_not_end_a_watch(quick: hw.Store, many: Path) -> None:
    def change() -> None:
        (many / "8.txt").unlink()
        write(many, 9, 11)

    with pytest.raises(Ended):
        ingest(quick, many, STREAM, watch=True, settle=0, pause=do_at_first(change))
    assert stored(quick) == expected(many)


def test_a_file_that_changes_while_it_is_read_is_not_stored(quick: hw.Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_and_write(*args: Any, **options: Any) -> Iterator[Piece]:
        yield from read_file(*args, **options)
        write(folder, 1, 11)

    monkeypatch.setattr("headwater.ingest.reading.read_file", read_and_write)
    with pytest.raises(hw.ConflictError, match=r"1\.txt changed while it was read.*nothing of it is stored"):
        ingest(quick, folder / "1.txt", STREAM)
    assert stored(quick) == []


def test_a_format_can_not_change_in_the_middle_of_a_file(quick: hw.Store, folder: Path) -> None:
    progress, pause = end_after(4)
    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, events_per_transaction=4, progress=progress, pause=pause)
    with pytest.raises(hw.InvalidRequestError, match="stored in part, read as lines"):
        ingest(quick, folder, STREAM, format="jsonl")


# Two at once.


class Background:
    """An ingestion in a thread of its own, that waits before each piece until it may go on."""

    def __init__(self, store: hw.Store, folder: Path, **options: object) -> None:
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()
        self.report: Report | None = None
        self.error: BaseException | None = None
        self.said: list[str] = []
        self._thread = threading.Thread(target=self._run, args=(store, folder, options), daemon=True)
        self._thread.start()

    def _run(self, store: hw.Store, folder: Path, options: dict[str, object]) -> None:
        try:
            self.report = ingest(store, folder, STREAM, pause=self._pause, notice=self._notice, **options)  # type: ignore[arg-type]
        except BaseException as error:
            self.error = error

    def _pause(self, seconds: float) -> None:
        self.is_waiting.set()
        assert self.may_go_on.wait(seconds or PATIENCE_SECONDS) or seconds

    def _notice(self, text: str) -> None:
        self.said.append(text)

    def wait_for(self) -> None:
        assert self.is_waiting.wait(PATIENCE_SECONDS)

    def end(self) -> None:
        self.may_go_on.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


def test_of_two_at_once_the_second_ends_with_a_clear_line(store: hw.Store, folder: Path) -> None:
    first = Background(store, folder)
    first.wait_for()
    with pytest.raises(
        hw.ConflictError, match=rf"process {os.getpid()} on \S+ ingests into a/lines.ingest already: wait for it with --standby"
    ):
        ingest(store, folder, STREAM)
    first.end()
    assert first.error is None and stored(store) == expected(folder)


def test_a_standby_waits_and_takes_over_when_the_first_is_done(store: hw.Store, folder: Path) -> None:
    first = Background(store, folder / "0.txt")
    first.wait_for()
    second = Background(store, folder, standby=True)
    second.wait_for()
    assert "waiting to take over" in second.said[0]
    first.end()
    second.end()
    assert first.error is None and second.error is None and second.report is not None
    assert (second.report.files, second.report.files_before) == (2, 1) and stored(store) == expected(folder)


def test_who_was_taken_over_stops_itself_and_stores_nothing(store: hw.Store, folder: Path) -> None:
    first = Background(store, folder)
    first.wait_for()
    assert ingest(store, folder, STREAM, take_over=True).files == 3
    first.end()
    assert isinstance(first.error, hw.FencedError), first.error
    assert "took over, and is done: this one stops" in str(first.error)
    assert stored(store) == expected(folder)


def test_a_lease_that_ran_out_is_no_reason_to_stop_if_nobody_took_over(store: hw.Store, folder: Path) -> None:
    first = Background(store, folder, events_per_transaction=4)
    first.wait_for()
    (open_one,) = store.transactions(only_open=True)
    store.resume_transaction(open_one.id).abort()  # what upkeep does with it then
    first.end()
    assert first.error is None and stored(store) == expected(folder)


@pytest.mark.slow
def test_one_elsewhere_is_waited_for_until_its_lease_runs_out(store: hw.Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Background(store, folder, lease=6.0)
    first.wait_for()
    # Seen from another host nobody knows whether it runs: it does, and renews its transaction.
    monkeypatch.setattr("headwater.ingest.holder._host", lambda: "elsewhere")
    said: list[str] = []
    with pytest.raises(hw.ConflictError, match="already"):
        ingest(store, folder, STREAM, notice=said.append, lease=6.0)
    assert "waiting up to 6 s for a sign of life" in said[0]
    first.end()
    assert first.error is None


# Files that keep arriving.


def test_watching_takes_files_as_they_arrive_if_nobody_writes_to_them(quick: hw.Store, folder: Path) -> None:
    polls = 0

    def settle(*paths: Path) -> None:
        for path in paths:
            os.utime(path, (1, 1))

    def pause(seconds: float) -> None:
        nonlocal polls
        polls += bool(seconds)
        if not seconds:
            return
        if polls == 1:
            assert stored(quick) == [], "all were written a moment ago"
            settle(*folder.iterdir())
        elif polls == 2:
            assert stored(quick) == expected(folder)
            settle(write(folder, 3))
            (folder / "growing.log").write_text("not yet\n")
        else:
            assert len(stored(quick)) == 40
            raise Ended

    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, watch=True, settle=3600, pause=pause)


def test_a_file_that_stays_as_it_is_has_settled(quick: hw.Store, folder: Path) -> None:
    def pause(seconds: float) -> None:
        threading.Event().wait(seconds)
        if seconds and len(stored(quick)) == 30:
            raise Ended

    for path in folder.iterdir():
        os.utime(path, (1 << 32, 1 << 32))  # a clock that is wrong
    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, watch=True, settle=0.1, pause=pause)


def test_a_watch_begins_before_there_is_anything(quick: hw.Store, tmp_path: Path) -> None:
    polls = 0

    def pause(seconds: float) -> None:
        nonlocal polls
        polls += bool(seconds)
        if polls == 2 and seconds:
            write(tmp_path, 1)
        elif polls > 2:
            raise Ended

    with pytest.raises(Ended):
        ingest(quick, str(tmp_path / "*.txt"), STREAM, watch=True, settle=0, pause=pause)
    with pytest.raises(hw.NotFoundError):
        ingest(quick, str(tmp_path / "*.csv"), STREAM)


# What is remembered.


def test_what_is_remembered_stays_small(store: hw.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "_COMPACT_COMMITS", 10)
    for number in range(35):
        write(tmp_path, number, 1)
    ingest(store, str(tmp_path / "*.txt"), STREAM)
    assert len(list(store.revisioned("a/lines.ingest").read())) < 15, "the record's history is compacted"
    files = dict(store.table("a/lines.ingest.files").items())
    assert len(files) == 35 and max(len(entry.value) for entry in files.values()) < 250


def test_a_stream_that_was_deleted_takes_its_book_along(store: hw.Store, folder: Path) -> None:
    ingest(store, folder, STREAM)
    store.delete_stream(STREAM, seal=True)
    assert ingest(store, folder, STREAM).events == 30 and stored(store) == expected(folder)
    store.delete_stream(STREAM, seal=True)
    store.create_stream(STREAM)
    assert ingest(store, folder, STREAM, events_per_transaction=7).events == 30 and stored(store) == expected(folder)
    assert ingest(store, folder, STREAM).files_before == 3


def test_a_stream_that_is_made_anew_during_a_watch_gets_all_files(quick: hw.Store, folder: Path) -> None:
    polls = 0

    def pause(seconds: float) -> None:
        nonlocal polls
        polls += seconds > 0
        if seconds and polls == 1:
            quick.delete_stream(STREAM, seal=True)
        elif polls > 2:
            raise Ended

    with pytest.raises(Ended):
        ingest(quick, folder, STREAM, watch=True, settle=0, pause=pause)
    assert stored(quick) == expected(folder)


def test_names_with_dots_have_books_of_their_own(quick: hw.Store, folder: Path) -> None:
    assert [ingest(quick, folder, stream, name=name).events for stream, name in (("a/p.q", "r"), ("a/p", "q.r"))] == [30, 30]
    assert [ingest(quick, folder, stream, name=name).events for stream, name in (("a/p.q", "r"), ("a/p", "q.r"))] == [0, 0]


def test_names_as_long_as_can_be_and_files_whose_names_are_no_text(quick: hw.Store, tmp_path: Path) -> None:
    long = f"{'s' * 128}/{'t' * 128}"
    for name in (b"\xff.txt", b"\xfe.txt"):
        (tmp_path / os.fsdecode(name)).write_text("one line\n")
    pattern = str(tmp_path / "*.txt")
    assert ingest(quick, pattern, long).events == 2
    assert ingest(quick, pattern, long).files_before == 2
