"""Storage in files: crashes, forks, other processes, and how many files stay open."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.errors import AlreadyExistsError, CorruptDataError, InvalidRequestError, UnavailableError
from headwater.model.limits import KIB, MIB
from headwater.storage import local
from headwater.storage.interface import Push
from headwater.storage.layout import journal_key, object_key, parse_temporary_key
from headwater.storage.local import _OPEN_FILES, LocalStorage
from tests.storages import fail_once, filling

KEY = object_key(1, 0)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[LocalStorage]:
    opened = LocalStorage(str(tmp_path / "new" / "store"))
    yield opened
    opened.close()


def keys(storage: LocalStorage, prefix: str = "") -> list[str]:
    return [found.key for found in storage.list(prefix)]


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def watch_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are synced with os.fsync from now on: directories."""
    real, synced = os.fsync, list[str]()

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", watched)
    return synced


def test_a_put_that_was_killed_is_not_seen_and_can_be_repeated(tmp_path: Path) -> None:
    code = f"import sys; from headwater.storage import open_storage; open_storage(sys.argv[1]).put({KEY!r}, [b'content'])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HEADWATER_FAILPOINTS": "object.put=kill"}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False)
    assert run.returncode == -signal.SIGKILL
    storage = LocalStorage(str(tmp_path))
    assert keys(storage) == []
    (left,) = keys(storage, "tmp/")
    assert parse_temporary_key(left) == KEY
    storage.put(KEY, [b"content"])
    storage.delete([left])
    assert keys(storage, "tmp/") == []
    assert bytes(storage.get(KEY, 0, 7)) == b"content"


def test_a_put_whose_name_may_not_be_durable_fails_and_the_same_put_again_makes_sure(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put(object_key(1, 7), [b"makes the directories"])
    fail_once(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(UnavailableError, match="input/output error"):
        storage.put(KEY, [b"content"])
    synced = watch_syncs(monkeypatch)
    storage.put(KEY, [b"content"])
    assert synced == [os.path.dirname(storage._folder.path(KEY))]
    with pytest.raises(AlreadyExistsError):
        storage.put(KEY, [b"other!!"])


def test_every_directory_of_a_new_key_is_synced_into_the_one_above(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = watch_syncs(monkeypatch)
    storage.put(KEY, [b"x"])
    root = Path(storage._folder.root)
    assert {str(root.parent.parent), str(root.parent), str(root), str(root / "l0")} < set(synced)
    assert synced[-1] == str(root / "l0" / "000000000001")
    synced.clear()
    storage.put(object_key(1, 1), [b"x"])
    assert synced == [str(root / "l0" / "000000000001")]


def test_another_process_may_delete_the_last_object_of_a_directory_in_use(storage: LocalStorage) -> None:
    other = LocalStorage(storage.url.removeprefix("file://"))
    for index in range(3):
        storage.put(object_key(1, index), [b"x"])
        other.delete([object_key(1, index)])
    assert keys(storage) == []
    assert os.listdir(os.path.join(storage._folder.root, "l0")) == []


def test_files_next_to_the_folders_are_not_objects(storage: LocalStorage) -> None:
    storage.put(KEY, [b"x"])
    Path(storage._folder.root, "catalog.db").write_bytes(b"not ours")
    assert keys(storage) == [KEY]


@pytest.mark.parametrize("key", ["", "name", "/l0/x", "l0/../x", "../l0/x", "l0/.x", "l0//x", "l0/x/", "l0/x\0"])
def test_what_is_no_key_is_refused(storage: LocalStorage, key: str) -> None:
    for call in (
        lambda: storage.put(key, [b"x"]),
        lambda: storage.get(key, 0, 1),
        lambda: storage.delete([key]),
        lambda: storage.size(key),
    ):
        with pytest.raises(InvalidRequestError, match="is no key"):
            call()


def test_only_so_many_files_stay_open_and_none_after_closing(storage: LocalStorage) -> None:
    for index in range(_OPEN_FILES * 2):
        storage.put(object_key(1, index), [b"%02d" % index])
    before = count_open_files()
    for index in [*range(_OPEN_FILES * 2)] * 2:
        assert storage.get(object_key(1, index), 0, 2) == b"%02d" % index
    assert count_open_files() == before + _OPEN_FILES
    storage.close()
    assert count_open_files() == before


def test_a_deleted_file_gives_back_its_space_also_if_it_was_being_read(storage: LocalStorage) -> None:
    before = count_open_files()
    storage.put(KEY, [b"x"])
    storage.get(KEY, 0, 1)
    assert count_open_files() == before + 1
    storage.delete([KEY])
    assert count_open_files() == before


def test_threads_may_read_while_files_are_opened_closed_and_deleted(storage: LocalStorage) -> None:
    count = _OPEN_FILES + 8
    for index in range(count):
        storage.put(object_key(1, index), [b"%04d" % index * 1000])

    def read(number: int) -> bool:
        if number % 50 == 0:
            storage.delete([object_key(2, number)])
        index = number * 7 % count
        return bytes(storage.get(object_key(1, index), 400, 4)) == b"%04d" % index

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(2000)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_reads_through_the_same_files(storage: LocalStorage) -> None:
    storage.put(KEY, [b"content"])
    storage.get(KEY, 0, 1)
    child = os.fork()
    if child == 0:
        # Only os._exit: the child must not run the rest of pytest.
        try:
            os._exit(0 if storage.get(KEY, 0, 7) == b"content" and storage.get(KEY, 3, 4) == b"tent" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.get(KEY, 0, 7) == b"content"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EROFS, "read-only: mount it for writing"),
        (errno.EACCES, "permission denied: let this user"),
        (errno.EPERM, "must allow this user"),
        (errno.EDQUOT, "quota is used up: free some space, then flush again"),
        (errno.EMFILE, "too many files open"),
        (errno.ENXIO, os.strerror(errno.ENXIO)),
    ],
)
def test_what_the_system_refuses_is_said_with_the_path_and_what_to_do(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    storage.put(KEY, [b"x"])
    path = storage._folder.path(KEY)
    fail_once(monkeypatch, "open", code)
    with pytest.raises(UnavailableError, match=f"cannot read {path}: .*{message}") as caught:
        storage.get(KEY, 0, 1)
    assert caught.value.facts == {"path": path, "errno": code}
    fail_once(monkeypatch, "open", code)
    with pytest.raises(UnavailableError, match=f"cannot write {path}: .*{message}"):
        storage.put(KEY, [b"x"])


def test_a_read_that_comes_in_parts_is_put_together(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put(KEY, [b"0123456789"])
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: real(fd, min(length, 3), offset))
    assert storage.get(KEY, 1, 8) == b"12345678"
    with pytest.raises(CorruptDataError, match="9 were there"):
        storage.get(KEY, 1, 10)


@pytest.mark.parametrize("kind", ["file system", "file size limit"])
def test_a_put_on_a_full_disk_leaves_nothing_and_can_be_repeated(tmp_path: Path, kind: str) -> None:
    with filling(tmp_path, kind) as disk:
        storage = LocalStorage(str(disk.root))
        storage.put("l0/before", [b"before"])
        disk.fill()
        with pytest.raises(UnavailableError, match=rf"cannot write {disk.root}/l0/after: .*then flush again"):
            storage.put("l0/after", [bytes(MIB)])
        assert keys(storage) == ["l0/before"]
        assert keys(storage, "tmp/") == []
        disk.free()
        storage.put("l0/after", [bytes(MIB)])
        assert keys(storage) == ["l0/after", "l0/before"]
        storage.close()


def test_a_large_object_goes_to_the_disk_while_it_is_written(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int, int]] = []
    monkeypatch.setattr(local, "begin_sync", lambda fd, start, length: given.append(("begin", start, start + length)))
    monkeypatch.setattr(local, "wait_sync", lambda fd, start, length: given.append(("wait", start, start + length)))

    push = Push()

    def produce(sink: pa.NativeFile) -> None:
        for _ in range(3):
            sink.write(bytes(4 * MIB))
            push(sink.tell())
        sink.write(b"end")
        push(sink.tell())

    storage.write(KEY, produce, push)
    # Each part is waited for when the next one is there, and one of three bytes is left to the last sync.
    assert given == [
        ("wait", 0, 0), ("begin", 0, 4 * MIB), ("wait", 0, 4 * MIB), ("begin", 4 * MIB, 8 * MIB),
        ("wait", 4 * MIB, 8 * MIB), ("begin", 8 * MIB, 12 * MIB),
    ]  # fmt: skip
    assert storage.size(KEY) == 12 * MIB + 3
    assert bytes(storage.get(KEY, 12 * MIB, 3)) == b"end"


def test_a_write_ahead_file_is_freed_in_parts_with_rests_between(storage: LocalStorage) -> None:
    key = journal_key(1, 0)
    storage.put(key, [bytes(9 * MIB)])
    sizes: list[int | None] = []
    storage.delete([key], lambda: sizes.append(storage.size(key)))
    assert sizes == [size * MIB for size in range(8, 0, -1)]
    assert storage.size(key) is None


def test_a_write_ahead_file_with_another_name_keeps_its_bytes_under_that(storage: LocalStorage, tmp_path: Path) -> None:
    key = journal_key(1, 0)
    storage.put(key, [bytes(range(256)) * (16 * KIB)])
    os.link(tmp_path / "new" / "store" / key, tmp_path / "backup")
    storage.delete([key, journal_key(1, 1)])
    assert storage.size(key) is None
    assert (tmp_path / "backup").read_bytes() == bytes(range(256)) * (16 * KIB)


def test_other_objects_than_write_ahead_files_are_deleted_whole(storage: LocalStorage) -> None:
    """A chunk may be read by programs that know nothing of plans: an open file stays whole."""
    storage.put(KEY, [bytes(5 * MIB)])
    path = storage.url.removeprefix("file://") + "/" + KEY
    with open(path, "rb") as opened:
        storage.delete([KEY])
        assert len(opened.read()) == 5 * MIB


def test_a_write_ahead_file_that_may_not_be_written_to_is_deleted_whole(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    key = journal_key(1, 0)
    storage.put(key, [bytes(5 * MIB)])

    def refuse(path: str, length: int) -> None:
        raise PermissionError(errno.EACCES, "another user's", path)

    monkeypatch.setattr(os, "truncate", refuse)
    storage.delete([key])
    assert storage.size(key) is None
