"""What every storage promises, on memory, files and a server that speaks S3."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.errors import AlreadyExistsError, CorruptDataError, InvalidRequestError, UnavailableError
from headwater.runtime import failpoints
from headwater.runtime.clock import now_us
from headwater.storage import Storage, open_storage
from headwater.storage.layout import journal_key, object_key
from tests.s3server import BUCKET, S3Server, running_s3
from tests.storages import DelayedStorage

KEY = object_key(1, 0)
_names = itertools.count()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture(params=["memory", "local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        opened = open_storage(f"s3://{BUCKET}/some/prefix{next(_names)}", server.options)
    else:
        opened = open_storage(str(tmp_path / "store") if request.param == "local" else f"memory://contract{next(_names)}")
    yield opened
    opened.close()


@pytest.fixture(params=["memory", "local"])
def local_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    opened = open_storage(str(tmp_path / "store") if request.param == "local" else f"memory://contract{next(_names)}")
    yield opened
    opened.close()


@pytest.fixture
def armed() -> Iterator[None]:
    """Disarms the failpoints that a test armed."""
    yield
    failpoints.arm("")


def read(storage: Storage, key: str) -> bytes:
    size = storage.size(key)
    assert size is not None
    return bytes(storage.get(key, 0, size))


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return [found.key for found in storage.list(prefix)]


def test_what_was_put_is_read_back_whatever_kind_of_buffers_it_came_in(storage: Storage) -> None:
    numbers = array.array("i", [1, 2, 3])
    buffers = [b"ab", b"", bytearray(b"cd"), memoryview(b"xefx")[1:3], pa.py_buffer(b"gh"), memoryview(numbers)]
    storage.put(KEY, buffers)
    assert read(storage, KEY) == b"abcdefgh" + numbers.tobytes()


def test_a_range_is_exactly_what_was_asked_for(storage: Storage) -> None:
    storage.put(KEY, [b"0123456789"])
    assert bytes(storage.get(KEY, 0, 10)) == b"0123456789"
    assert bytes(storage.get(KEY, 9, 1)) == b"9"
    assert bytes(storage.get(KEY, 4, 0)) == b""


def test_what_is_read_can_be_used_by_arrow_without_a_copy(storage: Storage) -> None:
    storage.put(KEY, [bytes(range(64))])
    for data in (storage.get(KEY, 8, 16), *storage.get_ranges(KEY, [(8, 16), (24, 8)])):
        assert memoryview(data).format == "B"
        assert pa.py_buffer(data)[:8].to_pybytes() == memoryview(data)[:8].tobytes()


def test_ranges_come_back_in_the_order_in_which_they_were_asked_for(storage: Storage) -> None:
    content = bytes(range(256)) * 40_000
    storage.put(KEY, [content])
    ranges = [(10_000_000, 100), (0, 10), (5, 10), (0, 0), (8_000_000, 2_000_000), (0, 10), (20, 1)]
    assert [bytes(data) for data in storage.get_ranges(KEY, ranges)] == [content[start : start + length] for start, length in ranges]
    assert storage.get_ranges(KEY, []) == []


def test_what_is_expected_is_read_as_before_also_if_it_is_missing(storage: Storage) -> None:
    storage.put(KEY, [b"0123456789"])
    assert storage.expect(KEY, [(0, 4), (8, 100)]) == storage.local
    assert bytes(storage.get(KEY, 0, 4)) == b"0123"
    storage.expect("l0/000000000001/000009.hwb", [(0, 4)])
    with pytest.raises(CorruptDataError):
        storage.get("l0/000000000001/000009.hwb", 0, 4)


def test_an_object_may_be_empty(storage: Storage) -> None:
    storage.put(KEY, [])
    storage.put(KEY, [b""])
    assert storage.size(KEY) == 0
    assert keys(storage) == [KEY]


def test_the_same_put_again_changes_nothing(storage: Storage) -> None:
    storage.put(KEY, [b"one", b"two"])
    storage.put(KEY, [b"onetwo"])
    assert read(storage, KEY) == b"onetwo"


@pytest.mark.parametrize("other", [b"onetwO", b"onetw", b"onetwoo", b""])
def test_other_bytes_under_a_key_are_refused_and_the_first_ones_stay(storage: Storage, other: bytes) -> None:
    storage.put(KEY, [b"onetwo"])
    with pytest.raises(AlreadyExistsError, match=KEY):
        storage.put(KEY, [other])
    assert read(storage, KEY) == b"onetwo"
    assert keys(storage) == [KEY]


def test_a_missing_object_is_named(storage: Storage) -> None:
    storage.put(KEY, [b"here"])
    with pytest.raises(CorruptDataError, match=r"is missing: 7 bytes at 3 were wanted") as caught:
        storage.get(object_key(1, 1), 3, 7)
    assert caught.value.object == object_key(1, 1)
    assert caught.value.facts["missing"] is True
    with pytest.raises(CorruptDataError, match="missing"):
        storage.get_ranges(object_key(2, 1), [(0, 4), (100, 4)])


@pytest.mark.parametrize(("start", "length", "available"), [(0, 11, 10), (8, 4, 2), (10, 1, 0), (5_000_000, 1, 0)])
def test_an_object_that_is_too_short_says_how_much_was_there(storage: Storage, start: int, length: int, available: int) -> None:
    storage.put(KEY, [b"0123456789"])
    with pytest.raises(CorruptDataError, match=f"{length} bytes at {start} were wanted, {available} were there") as caught:
        storage.get(KEY, start, length)
    assert caught.value.object == KEY
    assert caught.value.facts["missing"] is False
    with pytest.raises(CorruptDataError, match="too short"):
        storage.get_ranges(KEY, [(0, 2), (start, length), (3_000_000, 5)])


def test_a_size_is_none_where_nothing_is(storage: Storage) -> None:
    assert storage.size(KEY) is None
    storage.put(KEY, [b"12345"])
    assert storage.size(KEY) == 5
    assert storage.size(object_key(1, 1)) is None


def test_deleted_objects_are_gone_and_missing_ones_are_fine(storage: Storage) -> None:
    for index in range(3):
        storage.put(object_key(1, index), [b"x"])
    assert bytes(storage.get(object_key(1, 1), 0, 1)) == b"x"
    storage.delete([object_key(1, 1), object_key(1, 7), object_key(9, 9)])
    storage.delete([object_key(1, 1)])
    storage.delete([])
    assert keys(storage) == [object_key(1, 0), object_key(1, 2)]
    with pytest.raises(CorruptDataError, match="missing"):
        storage.get(object_key(1, 1), 0, 1)


def test_a_session_can_go_on_after_all_its_objects_were_deleted(storage: Storage) -> None:
    storage.put(object_key(1, 0), [b"x"])
    storage.delete([object_key(1, 0)])
    storage.put(object_key(1, 1), [b"y"])
    assert keys(storage) == [object_key(1, 1)]


def test_a_list_is_ordered_and_ends_where_the_folder_does(storage: Storage) -> None:
    put = ["l0/1/b", "l0/1/a", "l0/10/a", "l0/1.x/a", "chunks/7", "l0/1/c/d"]
    for key in put:
        storage.put(key, [key.encode()])
    assert keys(storage) == sorted(put)
    assert keys(storage, "l0/1/") == ["l0/1/a", "l0/1/b", "l0/1/c/d"]
    assert keys(storage, "l0/") == sorted(put)[1:]
    assert keys(storage, "l0/2/") == []


def test_a_list_shows_sizes_and_times(storage: Storage) -> None:
    before_us = now_us() // 1_000_000 * 1_000_000
    storage.put(KEY, [b"12345"])
    (found,) = storage.list("l0/")
    assert found.bytes == 5
    # Object stores count whole seconds, and a file's clock may tick a little late.
    assert before_us - 1_000_000 <= found.modified_us <= now_us()


def test_an_empty_storage_lists_nothing(storage: Storage) -> None:
    assert keys(storage) == []


def test_puts_run_side_by_side(storage: Storage) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda index: storage.put(object_key(index % 3, index), [b"%d" % index] * 1000), range(24)))
    assert len(keys(storage)) == 24
    assert all(read(storage, object_key(index % 3, index)) == b"%d" % index * 1000 for index in range(24))


@pytest.mark.usefixtures("armed")
def test_a_put_that_failed_left_nothing_and_can_be_repeated(storage: Storage) -> None:
    failpoints.arm("object.put=error@1")
    with pytest.raises(UnavailableError, match=KEY):
        storage.put(KEY, [b"x"])
    assert keys(storage) == keys(storage, "tmp/") == []
    storage.put(KEY, [b"x"])
    assert read(storage, KEY) == b"x"


def test_what_is_written_into_a_file_is_one_object(storage: Storage) -> None:
    def produce(file: pa.NativeFile) -> None:
        for piece in (b"one", b"", b"two"):
            file.write(piece)

    storage.write(KEY, produce)
    assert read(storage, KEY) == b"onetwo" and keys(storage, "tmp/") == []
    with pytest.raises(AlreadyExistsError, match=KEY):
        storage.write(KEY, lambda file: file.write(b"other"))
    assert read(storage, KEY) == b"onetwo" and keys(storage, "tmp/") == []


def test_a_file_whose_writing_raised_is_not_there(storage: Storage) -> None:
    def produce(file: pa.NativeFile) -> None:
        file.write(b"half")
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        storage.write(KEY, produce)
    assert keys(storage) == keys(storage, "tmp/") == []


def test_only_local_storage_has_journals(storage: Storage) -> None:
    if storage.local:
        storage.journal(lambda index: journal_key(1, index)).close()
    else:
        with pytest.raises(InvalidRequestError, match="no journals"):
            storage.journal(lambda index: journal_key(1, index))


def test_a_delay_can_be_added_to_every_put(storage: Storage) -> None:
    waits: list[float] = []
    delayed: Storage = DelayedStorage(storage, 0.05, sleep=waits.append)
    delayed.put(KEY, [b"x"])
    assert waits == [0.05]
    assert read(storage, KEY) == b"x"


def test_what_was_appended_is_read_back_from_its_place(local_storage: Storage) -> None:
    journal = local_storage.journal(lambda index: journal_key(5, index))
    blocks = [bytes([number]) * (number * 7 + 1) for number in range(40)]
    places = [journal.append([block[:3], block[3:]]) for block in blocks]
    assert [bytes(local_storage.get(place.key, place.offset, len(block))) for place, block in zip(places, blocks, strict=True)] == blocks
    assert all(place.offset % 8 == 0 and place.key == journal_key(5, place.index) for place in places)
    journal.close()
    assert [bytes(local_storage.get(place.key, place.offset, len(block))) for place, block in zip(places, blocks, strict=True)] == blocks


def test_closing_a_journal_gives_back_what_was_not_used(local_storage: Storage) -> None:
    journal = local_storage.journal(lambda index: journal_key(5, index))
    journal.append([b"12345"])
    allotted = local_storage.size(journal_key(5, 0))
    assert allotted is not None
    assert allotted > 100_000
    journal.close()
    journal.close()
    assert local_storage.size(journal_key(5, 0)) == 8


def test_a_journal_that_was_never_used_leaves_nothing(local_storage: Storage) -> None:
    local_storage.journal(lambda index: journal_key(5, index)).close()
    assert keys(local_storage) == []


def test_closing_a_journal_does_not_bring_back_a_file_that_was_deleted(local_storage: Storage) -> None:
    journal = local_storage.journal(lambda index: journal_key(5, index))
    journal.append([b"x"])
    local_storage.delete([journal_key(5, 0)])
    journal.close()
    assert keys(local_storage) == []


def test_appends_of_several_threads_never_overlap(local_storage: Storage) -> None:
    journal = local_storage.journal(lambda index: journal_key(5, index))
    blocks = [bytes([number]) * (number + 1) * 100 for number in range(60)]
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(lambda block: journal.append([block]), blocks))
    for place, block in zip(places, blocks, strict=True):
        assert bytes(local_storage.get(place.key, place.offset, len(block))) == block


@pytest.mark.usefixtures("armed")
@pytest.mark.parametrize("failpoint", ["journal.created", "journal.written"])
def test_an_append_that_failed_can_be_repeated(local_storage: Storage, failpoint: str) -> None:
    failpoints.arm(f"{failpoint}=error@1")
    journal = local_storage.journal(lambda index: journal_key(5, index))
    with pytest.raises(UnavailableError, match="cannot"):
        journal.append([b"one"])
    place = journal.append([b"two"])
    assert bytes(local_storage.get(place.key, place.offset, 3)) == b"two"
    journal.close()
