"""Keys, object ids, merged ranges and the addresses of storages."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequestError
from headwater.storage import layout, open_storage
from headwater.storage.layout import INDEXES, SESSIONS, SessionKey
from headwater.storage.local import LocalStorage
from headwater.storage.ranges import merge, read_merged

sessions = st.integers(0, SESSIONS - 1)
indexes = st.integers(0, INDEXES - 1)
ranges = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 90)), max_size=12)


def test_keys_are_these() -> None:
    assert layout.journal_key(0xA1, 3) == "journal/0000000000a1/000003.hwj"
    assert layout.object_key(0xA1, 3) == "l0/0000000000a1/000003.hwb"


@given(sessions, indexes)
def test_keys_and_ids_can_be_taken_apart(session: int, index: int) -> None:
    assert layout.parse_key(layout.journal_key(session, index)) == SessionKey("journal", session, index)
    assert layout.parse_key(layout.object_key(session, index)) == SessionKey("l0", session, index)
    assert layout.parse_object_id(layout.object_id(session, index)) == (session, index)
    assert layout.object_id(session, index) < 2**63


@given(st.tuples(sessions, indexes), st.tuples(sessions, indexes))
def test_keys_and_ids_sort_like_their_numbers(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (layout.object_key(*one) < layout.object_key(*other)) == (one < other)
    assert (layout.object_id(*one) < layout.object_id(*other)) == (one < other)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "chunks/1/2.parquet",
        "l0/0000000000a1/000003.hwj",
        "journal/0000000000a1/000003.hwb",
        "l0/a1/3.hwb",
        "l0/0000000000A1/000003.hwb",
        f"l0/{SESSIONS:012x}/000003.hwb",
    ],
)
def test_what_is_no_session_key_is_not_taken_apart(key: str) -> None:
    assert layout.parse_key(key) is None


@pytest.mark.parametrize(("session", "index"), [(-1, 0), (SESSIONS, 0), (0, -1), (0, INDEXES)])
def test_numbers_that_do_not_fit_are_refused(session: int, index: int) -> None:
    for name in (layout.journal_key, layout.object_key, layout.object_id):
        with pytest.raises(InvalidRequestError):
            name(session, index)


@pytest.mark.parametrize("id", [-1, 2**63])
def test_what_is_no_object_id_is_refused(id: int) -> None:
    with pytest.raises(InvalidRequestError, match="no object id"):
        layout.parse_object_id(id)


def test_a_temporary_name_says_what_it_was_to_become() -> None:
    key = layout.object_key(1, 2)
    assert layout.parse_temporary_key(layout.temporary_key(key, "abc")) == key
    assert layout.parse_temporary_key(key) is None
    assert layout.parse_temporary_key("tmp/x") is None


@given(ranges, st.integers(0, 50), st.none() | st.integers(1, 200))
def test_merged_ranges_hold_all_that_was_asked_for(asked: list[tuple[int, int]], gap_bytes: int, most_bytes: int | None) -> None:
    content = bytes(number % 251 for number in range(500))
    merged = merge(asked, gap_bytes=gap_bytes, most_bytes=most_bytes)
    found = read_merged(asked, merged, lambda wanted: [content[start : start + length] for start, length in wanted])
    assert [bytes(data) for data in found] == [content[start : start + length] for start, length in asked]
    for (start, length), (after, _) in itertools.pairwise(merged):
        assert after >= start + length
        assert most_bytes is not None or after - (start + length) > gap_bytes


def test_ranges_are_merged_over_small_gaps_up_to_a_size() -> None:
    asked = [(0, 10), (14, 6), (40, 10), (50, 10)]
    assert merge(asked, gap_bytes=4) == [(0, 20), (40, 20)]
    assert merge(asked, gap_bytes=3) == [(0, 10), (14, 6), (40, 20)]
    assert merge(asked, gap_bytes=4, most_bytes=19) == [(0, 10), (14, 6), (40, 10), (50, 10)]


def test_a_path_and_a_file_url_open_the_same_storage(tmp_path: Path) -> None:
    path = tmp_path / "a folder, 100% mine"
    storage = open_storage(str(path))
    assert isinstance(storage, LocalStorage)
    assert storage.local
    storage.put("l0/a", [b"x"])
    again = open_storage(storage.url)
    assert bytes(again.get("l0/a", 0, 1)) == b"x"
    assert again.url == storage.url


def test_a_name_in_memory_is_one_storage_in_the_whole_process() -> None:
    open_storage("memory://names-one").put("l0/a", [b"x"])
    open_storage("memory://names-one").close()
    assert open_storage("memory://names-one").size("l0/a") == 1
    assert open_storage("memory://names-two").size("l0/a") is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "s3://, gs://, az://"),
        ("", "names no place"),
        ("memory://", "names no place"),
        ("file://", "names no place"),
        ("file://host/data", "three slashes"),
        ("s3://", "cannot open s3://"),
    ],
)
def test_an_address_that_cannot_be_opened_says_why(url: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        open_storage(url)


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="takes no storage options, and got: region"):
        open_storage(str(tmp_path), {"region": "x"})
    with pytest.raises(InvalidRequestError, match="nonsense"):
        open_storage("s3://bucket/x", {"nonsense": "x"})


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "headwater.storage.objects", raising=False)
    with pytest.raises(InvalidRequestError, match=r"pip install 'headwater\[s3\]'"):
        open_storage("s3://bucket/prefix")
