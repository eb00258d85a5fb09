"""A journal of files when things go wrong: full disks, failed syncs, short writes, files that were torn."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.errors import AlreadyExistsError, CorruptDataError, UnavailableError
from headwater.model.limits import KIB, MIB
from headwater.storage.files import IOV_MAX, Folder
from headwater.storage.interface import Place
from headwater.storage.journal import FileJournal
from headwater.storage.layout import journal_key
from headwater.storage.local import LocalStorage
from tests.storages import fail_once, filling


def open_journal(root: Path, file_bytes: int = 4 * KIB) -> FileJournal:
    return FileJournal(Folder(str(root)), lambda index: journal_key(5, index), file_bytes=file_bytes)


def read(root: Path, place: Place, length: int) -> bytes:
    storage = LocalStorage(str(root))
    found = bytes(storage.get(place.key, place.offset, length))
    storage.close()
    return found


def sizes(root: Path) -> dict[str, int]:
    return {found.key: found.bytes for found in LocalStorage(str(root)).list("journal/")}


def test_a_file_is_preallocated_and_another_begun_when_it_is_full(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    assert journal.append([bytes(1000)]) == Place(journal_key(5, 0), 0, 0)
    assert sizes(tmp_path) == {journal_key(5, 0): 4096}
    assert os.stat(tmp_path / journal_key(5, 0)).st_blocks * 512 >= 4096
    assert journal.append([bytes(3001)]) == Place(journal_key(5, 0), 0, 1000)
    assert journal.append([bytes(88)]) == Place(journal_key(5, 0), 0, 4008)
    assert journal.append([bytes(1)]) == Place(journal_key(5, 1), 1, 0)
    journal.close()
    assert sizes(tmp_path) == {journal_key(5, 0): 4096, journal_key(5, 1): 8}


def test_an_append_larger_than_a_file_gets_a_larger_file(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    small = journal.append([b"small"])
    large = journal.append([b"large" * 2001])
    assert (large.index, large.offset) == (1, 0)
    journal.close()
    assert sizes(tmp_path) == {journal_key(5, 0): 8, journal_key(5, 1): 10_008}
    assert read(tmp_path, small, 5) == b"small"
    assert read(tmp_path, large, 10_005) == b"large" * 2001


def begun_ahead(journal: FileJournal) -> bool:
    if journal._next is None:
        return False
    journal._next.wait()
    return not journal._next.failed


def test_the_next_file_is_begun_while_one_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    journal.append([bytes(1000)])
    assert not begun_ahead(journal)
    journal.append([bytes(2200)])
    assert begun_ahead(journal) and sizes(tmp_path) == {journal_key(5, 0): 4096, journal_key(5, 1): 4096}
    with monkeypatch.context() as patch:
        fail_once(patch, "posix_fallocate", errno.EIO)
        assert journal.append([bytes(1000)]) == Place(journal_key(5, 1), 1, 0)
    journal.append([bytes(100)])
    assert begun_ahead(journal)
    journal.close()
    assert sizes(tmp_path) == {journal_key(5, 0): 3200, journal_key(5, 1): 1104}


def test_a_journal_at_rest_has_no_preallocated_space_and_goes_on_in_another_file(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.rest()
    assert journal.first_index == 0
    first = journal.append([bytes(2100)])
    assert begun_ahead(journal) and journal.first_index == first.index == 0
    journal.rest()
    assert sizes(tmp_path) == {first.key: 2104} and journal.first_index == 1
    journal.rest()
    assert journal.append([bytes(1)]).index == journal.first_index == 1
    journal.close()
    assert sizes(tmp_path) == {first.key: 2104, journal_key(5, 1): 8} and journal.first_index == 2


def test_an_append_that_is_under_way_never_lies_before_the_first_index_that_was_seen_before_it(tmp_path: Path) -> None:
    journal, failures = open_journal(tmp_path), list[str]()

    def append() -> None:
        for length in (1000, 3000, 5000, 100):
            seen = journal.first_index
            place = journal.append([bytes(length)])
            if not seen <= place.index <= journal.first_index:
                failures.append(f"{seen} {place.index} {journal.first_index}")

    threads = [threading.Thread(target=append) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert failures == [] and journal.first_index > 8


def test_a_file_that_could_not_be_begun_ahead_is_begun_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    journal.append([bytes(10)])
    fail_once(monkeypatch, "posix_fallocate", errno.ENOSPC)
    journal.append([bytes(2100)])
    assert not begun_ahead(journal) and list(sizes(tmp_path)) == [journal_key(5, 0)]
    assert journal.append([bytes(2100)]) == Place(journal_key(5, 1), 1, 0)
    journal.close()


def test_a_file_begun_ahead_that_is_too_small_is_left(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    journal.append([bytes(2100)])
    assert begun_ahead(journal)
    place = journal.append([b"large" * 2001])
    assert place.index == 1, "garbage collection counts on neighbours being used at about the same time"
    journal.close()
    assert read(tmp_path, place, 10_005) == b"large" * 2001
    assert sizes(tmp_path) == {journal_key(5, 0): 2104, place.key: 10_008}


def test_a_full_file_is_trimmed_when_the_last_append_to_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    real, found = os.fdatasync, list[int]()

    def append_another_first(fd: int) -> None:
        monkeypatch.setattr(os, "fdatasync", real)
        assert journal.append([bytes(4000)]).index == 1
        found.append(sizes(tmp_path)[journal_key(5, 0)])
        real(fd)

    monkeypatch.setattr(os, "fdatasync", append_another_first)
    journal.append([bytes(1000)])
    assert [*found, sizes(tmp_path)[journal_key(5, 0)]] == [4096, 1000]
    journal.close()


def test_a_write_that_takes_only_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    taken: list[int] = []

    def take_seven_bytes(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        taken.append(real(fd, [b"".join(buffers)[:7]], offset))
        return taken[-1]

    monkeypatch.setattr(os, "pwritev", take_seven_bytes)
    place = open_journal(tmp_path).append([b"0123", b"4567", b"89", b"abcdefghijk", b"l"])
    assert taken == [7, 7, 7, 1]
    assert read(tmp_path, place, 22) == b"0123456789abcdefghijkl"


def test_more_buffers_than_the_kernel_takes_at_once_are_written(tmp_path: Path) -> None:
    buffers = [b"%06d" % number for number in range(2 * IOV_MAX + 3)]
    place = open_journal(tmp_path).append(buffers)
    assert read(tmp_path, place, 6 * len(buffers)) == b"".join(buffers)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_after_a_failed_write_or_sync_the_file_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    journal = open_journal(tmp_path)
    before = journal.append([b"before"])
    fail_once(monkeypatch, call, errno.EIO)
    with pytest.raises(UnavailableError, match=f"{tmp_path}/{journal_key(5, 0)}.*input/output error") as caught:
        journal.append([b"failed"])
    assert caught.value.facts["errno"] == errno.EIO
    after = journal.append([b"after"])
    assert (before.index, after.index) == (0, 1)
    assert read(tmp_path, before, 6) == b"before"
    assert read(tmp_path, after, 5) == b"after"


def test_a_failed_append_does_not_spoil_one_that_another_thread_has_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    real = os.fdatasync

    def fail_another_first(fd: int) -> None:
        # While this append waits for its sync, another one of the same file fails, and the file is abandoned and trimmed.
        fail_once(monkeypatch, "fdatasync", errno.EIO)
        with pytest.raises(UnavailableError):
            journal.append([b"other"])
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fail_another_first)
    place = journal.append([b"mine"])
    assert read(tmp_path, place, 4) == b"mine"


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_file_that_could_not_be_begun_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    journal = open_journal(tmp_path)
    fail_once(monkeypatch, call, errno.EIO)
    with pytest.raises(UnavailableError, match="cannot begin a journal file in"):
        journal.append([b"x"])
    assert sizes(tmp_path) == {}
    assert read(tmp_path, journal.append([b"y"]), 1) == b"y"


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(monkeypatch, "open", errno.EROFS)
    with pytest.raises(UnavailableError, match=f"{tmp_path}: the file system is read-only: mount it for writing"):
        open_journal(tmp_path).append([b"x"])


def test_a_journal_that_another_process_writes_as_this_session_is_refused(tmp_path: Path) -> None:
    open_journal(tmp_path).append([b"x"])
    with pytest.raises(AlreadyExistsError, match="another process writes as this session"):
        open_journal(tmp_path).append([b"y"])


def test_an_append_to_a_file_that_upkeep_removed_begins_another(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    place = journal.append([b"x"])
    LocalStorage(str(tmp_path)).delete([place.key])
    again = journal.append([b"y"])
    assert again.index == 1 and read(tmp_path, again, 1) == b"y"


def test_a_torn_file_is_an_error_that_names_it_and_spares_the_rest(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    whole, torn = journal.append([b"whole!!!"]), journal.append([b"torn" * 4])
    os.truncate(tmp_path / whole.key, 12)
    with pytest.raises(CorruptDataError, match="16 bytes at 8 were wanted, 4 were there") as caught:
        read(tmp_path, torn, 16)
    assert caught.value.object == torn.key
    assert read(tmp_path, whole, 8) == b"whole!!!"


@pytest.mark.parametrize("failpoint", ["journal.created=kill@2", "journal.written=kill@2"])
def test_what_was_appended_outlives_a_kill(tmp_path: Path, failpoint: str) -> None:
    code = (
        "import sys; from headwater.storage.files import Folder; from headwater.storage.journal import FileJournal\n"
        "from headwater.storage.layout import journal_key\n"
        "journal = FileJournal(Folder(sys.argv[1]), lambda index: journal_key(5, index), file_bytes=4096)\n"
        "print(journal.append([b'first' * 200]).offset, flush=True)\n"
        "journal.append([b'second' * 600])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HEADWATER_FAILPOINTS": failpoint}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGKILL, "0\n", "")
    assert read(tmp_path, Place(journal_key(5, 0), 0, 0), 1000) == b"first" * 200


@pytest.mark.parametrize("kind", ["file system", "file size limit"])
def test_a_full_disk_costs_nothing_but_the_append_that_met_it(tmp_path: Path, kind: str) -> None:
    with filling(tmp_path, kind) as disk:
        journal = open_journal(disk.root, file_bytes=MIB)
        before = journal.append([b"before" * 1000])
        disk.fill()
        with pytest.raises(UnavailableError, match=rf"cannot begin a journal file in {disk.root}.*then flush again"):
            journal.append([bytes(2 * MIB)])  # More than what the first file gives back.
        assert list(sizes(disk.root)) == [before.key]
        disk.free()
        after = journal.append([b"after!" * 100_000])
        assert read(disk.root, before, 6000) == b"before" * 1000
        assert read(disk.root, after, 600_000) == b"after!" * 100_000
        journal.close()


@pytest.mark.parametrize("kind", ["file system", "file size limit"])
def test_a_nearly_full_disk_is_used_to_the_end(tmp_path: Path, kind: str) -> None:
    with filling(tmp_path, kind) as disk:
        disk.fill()
        journal = open_journal(disk.root, file_bytes=MIB)
        place = journal.append([b"fits"])
        assert read(disk.root, place, 4) == b"fits"
        assert sizes(disk.root) == {place.key: 8}
        disk.free()


def test_files_of_a_nearly_full_disk_have_neighbouring_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(fd: int, start: int, size: int) -> None:
        if size > 1000:
            raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    journal = open_journal(tmp_path)
    # Which of them garbage collection may take is told by how far apart they are.
    assert [journal.append([bytes(900)]).index for _ in range(4)] == [0, 1, 2, 3]
    journal.close()
