"""What can't be opened, can't be a name, or could not be read once stored: a typed error with the fact in it, and nothing made."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog.mounts import file_system_of, refuse_network_mount
from headwater.catalog.postgres import PostgresDatabase
from headwater.catalog.schema import open_catalog
from headwater.check import check_store
from tests.crash.processes import Place


@pytest.fixture
def store(tmp_path: Path) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store") as store:
        yield store


# Opening.


def test_a_path_a_string_and_a_file_url_open_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ids = set()
    for url in (
        tmp_path / "my store",
        str(tmp_path / "my store"),
        f"file://{tmp_path}/my store",
        f"file://{tmp_path}/my%20store",
        "my store",
    ):
        with hw.open(url) as store:
            ids.add(store.id)
            assert "my store" in repr(store)
    assert len(ids) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["my store"]


@pytest.mark.slow
def test_a_store_that_is_missing_is_not_made_unless_asked_for(tmp_path: Path, postgres_url: str) -> None:
    for catalog in (None, postgres_url):
        with pytest.raises(hw.NotFoundError, match="no headwater store"):
            hw.open(tmp_path / "none", catalog=catalog, create=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(hw.NotFoundError, match="no headwater store"):
        hw.open(tmp_path / "empty", create=False)
    assert os.listdir(tmp_path) == ["empty"] and os.listdir(tmp_path / "empty") == []


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for create in (True, False):
            with pytest.raises((hw.InvalidRequestError, hw.NotFoundError), match="file"):
                hw.open(path, create=create)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("url", ["", None, 7, b"path", ["a"]], ids=repr)
def test_what_is_no_address_is_refused(url: Any) -> None:
    with pytest.raises(hw.InvalidRequestError, match="address of a store"):
        hw.open(url)


@pytest.mark.parametrize("url", ["memory://", "file://", "file://localhost"])
def test_an_address_without_a_place_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for create in (True, False):
        with pytest.raises(hw.InvalidRequestError, match="names no place"):
            hw.open(url, create=create)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("url", ["\0", "a\0b", "file:///a%00b", "\ud800"], ids=repr)
def test_what_can_not_be_a_directory_s_name_is_refused(url: str) -> None:
    with pytest.raises(hw.InvalidRequestError, match="can't name a directory"):
        hw.open(url)
    with pytest.raises(hw.NotFoundError, match="no headwater store"):
        hw.open(url, create=False)


def test_a_path_may_begin_with_the_user_s_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with hw.open("~/store") as store:
        assert store.url == str(tmp_path / "home" / "store")
    with pytest.raises(hw.NotFoundError, match=str(tmp_path / "home")):
        hw.open("~", create=False)
    with hw.open("./~") as store, hw.open(f"file://{tmp_path}/~", create=False) as same:
        assert store.url == same.url == str(tmp_path / "~")


def test_a_store_in_memory_that_is_missing_is_named_by_its_address() -> None:
    with pytest.raises(hw.NotFoundError, match="no headwater store at memory://never made"):
        hw.open("memory://never made", create=False)


@pytest.mark.parametrize("create", [True, False])
def test_a_path_that_no_directory_can_have_is_refused(tmp_path: Path, create: bool) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / ("x" * 300), tmp_path.joinpath(*["x"] * 2500), tmp_path / "loop" / "x"):
        with pytest.raises(hw.InvalidRequestError if create else hw.NotFoundError):
            hw.open(path, create=create)


@pytest.mark.parametrize("rest", ["?z=1", "#y", "?", "#"])
def test_a_url_whose_path_would_end_early_is_refused(tmp_path: Path, rest: str) -> None:
    with pytest.raises(hw.InvalidRequestError, match="%3F"):
        hw.open(f"file://{tmp_path}/store{rest}")
    assert list(tmp_path.iterdir()) == []
    with hw.open(f"file://{tmp_path}/a%3Fb%23c"):
        assert (tmp_path / "a?b#c").is_dir()


def test_a_store_that_lost_its_catalog_is_left_as_it_is(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store, store.create_stream("a/x").writer() as writer:
        writer.write("x")
    for file in (tmp_path / "store").glob("catalog.sqlite*"):
        file.rename(tmp_path / file.name)
    before = sorted((tmp_path / "store").rglob("*"))
    with pytest.raises(hw.InvalidRequestError, match=r"no catalog\.sqlite: put it back"):
        hw.open(tmp_path / "store")
    with pytest.raises(hw.InvalidRequestError, match=r"no catalog\.sqlite: put it back, or give the catalog"):
        hw.open(tmp_path / "store", create=False)
    assert sorted((tmp_path / "store").rglob("*")) == before
    for file in tmp_path.glob("catalog.sqlite*"):
        file.rename(tmp_path / "store" / file.name)
    with hw.open(tmp_path / "store", create=False) as store:
        assert [event.value for event in store.stream("a/x").read()] == [b"x"]


@pytest.mark.parametrize("url", ["ftp://host/x", "http://host/x", "hdfs://x", "S3x://b"])
def test_an_unknown_scheme_is_refused_with_those_that_are_known(url: str) -> None:
    with pytest.raises(hw.InvalidRequestError, match="memory://, s3://, gs://, az://"):
        hw.open(url)


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket", "az://container/x"])
def test_an_object_store_needs_a_catalog_on_postgresql(url: str) -> None:
    with pytest.raises(hw.InvalidRequestError, match="needs a catalog on PostgreSQL"):
        hw.open(url)


@pytest.mark.parametrize("catalog", ["sqlite:///x", "mysql://x", "/a/path", "", "postgresql", 5, b"postgresql://x"])
def test_a_catalog_is_on_postgresql_or_not_given(tmp_path: Path, catalog: Any) -> None:
    with pytest.raises(hw.InvalidRequestError, match="postgresql://"):
        hw.open(tmp_path / "store", catalog=catalog)
    assert not (tmp_path / "store").exists()


def test_a_store_in_memory_has_its_own_catalog() -> None:
    with pytest.raises(hw.InvalidRequestError, match="leave out `catalog`"):
        hw.open("memory://with-catalog", catalog="postgresql://localhost/x")


def test_a_catalog_that_can_not_be_reached_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(hw.UnavailableError, match="out of reach") as caught:
        hw.open(tmp_path / "store", catalog=f"postgresql://me:geheim@/none?host={tmp_path}")
    assert "geheim" not in str(caught.value)
    assert not (tmp_path / "store").exists(), "nothing stays of it"


def test_a_catalog_s_address_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    for url in ("postgresql://?nonsense=1", "postgresql://[::1/x"):
        with pytest.raises(hw.InvalidRequestError, match="PostgreSQL"):
            hw.open(tmp_path / "store", catalog=url)


BLOCK = "import sys; sys.modules[{module!r}] = None; import headwater as hw; hw.open({url!r}, catalog={catalog!r})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "url", "catalog", "extra"),
    [("psycopg", "store", "postgresql://localhost/x", "postgres"), ("obstore", "s3://bucket/x", "postgresql://localhost/x", "s3")],
)
def test_a_missing_library_is_named_with_the_extra_to_install(tmp_path: Path, module: str, url: str, catalog: str, extra: str) -> None:
    program = BLOCK.format(module=module, url=url, catalog=catalog)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert f"pip install 'headwater[{extra}]'" in done.stderr.splitlines()[-1]
    assert "InvalidRequestError" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_storage_and_catalog_of_two_stores_are_not_mixed(tmp_path: Path, postgres_url: str) -> None:
    with hw.open(tmp_path / "one", catalog=postgres_url) as one:
        stream = one.create_stream("a/x")
        with stream.writer() as writer:
            writer.write("x")
    with hw.open(tmp_path / "two"):
        pass
    with pytest.raises(hw.InvalidRequestError, match="belongs to another store"):
        hw.open(tmp_path / "two", catalog=postgres_url)
    with hw.open(tmp_path / "one", catalog=postgres_url) as one:
        assert [event.value for event in one.stream("a/x").read()] == [b"x"]


@pytest.mark.parametrize("create", [True, False])
def test_an_empty_directory_is_not_taken_for_the_storage_of_a_catalog_in_use(tmp_path: Path, postgres_url: str, create: bool) -> None:
    with hw.open(tmp_path / "right", catalog=postgres_url, upkeep=False) as store, store.create_stream("a/x").writer() as writer:
        writer.write("x")
    (tmp_path / "wrong").mkdir()  # As when a volume is not mounted.
    with pytest.raises(hw.InvalidRequestError, match="wrong holds nothing of the store in this catalog"):
        hw.open(tmp_path / "wrong", catalog=postgres_url, create=create, upkeep=False)
    assert list((tmp_path / "wrong").rglob("*id*")) == []
    with hw.open(tmp_path / "right", catalog=postgres_url, create=create, upkeep=False) as store:
        assert [event.value for event in store.stream("a/x").read()] == [b"x"]


def test_a_store_whose_maker_died_before_it_marked_the_storage_is_opened(tmp_path: Path, postgres_url: str) -> None:
    database = PostgresDatabase(postgres_url)
    made = open_catalog(database, "postgresql", create=True)
    database.close()
    with hw.open(tmp_path / "store", catalog=postgres_url, upkeep=False) as store:
        assert store.id == made
        store.create_stream("a/x")
    with hw.open(tmp_path / "store", catalog=postgres_url, create=False, upkeep=False) as store:
        assert store.streams() == ["a/x"]


def test_a_directory_restored_without_its_mark_is_marked_again(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store", upkeep=False) as store:
        store.create_stream("a/x")
    (tmp_path / "store" / "store" / "id").unlink()
    with hw.open(tmp_path / "store", create=False, upkeep=False) as store:
        assert store.streams() == ["a/x"]
        assert (tmp_path / "store" / "store" / "id").read_text() == store.id


def test_storage_options_are_for_object_stores(tmp_path: Path) -> None:
    with pytest.raises(hw.InvalidRequestError, match="region"):
        hw.open(tmp_path / "store", storage_options={"region": "x"})


def test_what_is_no_database_is_damage_and_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "catalog.sqlite").write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(hw.CorruptDataError, match=r"catalog\.sqlite") as caught:
        hw.open(tmp_path / "store")
    assert caught.value.object is not None and caught.value.object.endswith("catalog.sqlite")
    assert (tmp_path / "store" / "catalog.sqlite").read_bytes().startswith(b"not a database")


# Network file systems.

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/export /mnt/nfs nfs4 rw 0 0
//host/share /mnt/my\\040share cifs rw 0 0
//host/share /mnt/gemäß\\040日本\\134040\x85x nfs rw 0 0
user@host:/ /mnt/ssh fuse.sshfs rw 0 0
tmpfs /mnt/nfs/local tmpfs rw 0 0
s3 /mnt/over ext4 rw 0 0
s3 /mnt/over fuse.s3fs rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/store", "ext4"),
        ("/", "ext4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs/a/b", "nfs4"),
        ("/mnt/nfsx", "ext4"),
        ("/mnt/nfs/local/store", "tmpfs"),
        ("/mnt/my share/store", "cifs"),
        ("/mnt/gemäß 日本\\040\x85x/store", "nfs"),
        ("/mnt/ssh/x", "fuse.sshfs"),
        ("/mnt/over/x", "fuse.s3fs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_deepest_and_last_mount(path: str, kind: str) -> None:
    assert file_system_of(path, MOUNTS) == kind


@pytest.mark.parametrize("path", ["/mnt/nfs/store", "/mnt/my share/store", "/mnt/ssh/x", "/mnt/over/x"])
def test_a_catalog_on_a_network_file_system_is_refused_with_what_to_use(path: str) -> None:
    with pytest.raises(hw.InvalidRequestError, match=r"network file system.*PostgreSQL \(catalog='postgresql://"):
        refuse_network_mount(path, MOUNTS)


@pytest.mark.parametrize("path", ["/data/store", "/mnt/nfs/local/store"])
def test_a_catalog_on_a_local_file_system_is_fine(path: str) -> None:
    refuse_network_mount(path, MOUNTS)
    refuse_network_mount(path, "")


def test_nothing_is_made_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/ {tmp_path.resolve()} nfs rw 0 0\n"
    monkeypatch.setattr("headwater.store.refuse_network_mount", lambda path: refuse_network_mount(path, mounts))
    with pytest.raises(hw.InvalidRequestError, match="network file system"):
        hw.open(tmp_path / "deep" / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_link_does_not_hide_a_network_file_system(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "remote")
    with pytest.raises(hw.InvalidRequestError, match="nfs"):
        refuse_network_mount(str(tmp_path / "link"), f"/dev/sda1 / ext4 rw 0 0\nserver:/ {tmp_path.resolve()}/remote nfs rw 0 0\n")


# Names and options.


@pytest.mark.parametrize(
    "name", ["", "a", "a/", "/a", "a/b/c", "a b/c", "a/-b", "a/" + "x" * 129, "ä/b", "a/b\n", None, 7, b"a/b"], ids=repr
)
def test_what_can_not_name_a_stream_is_refused_everywhere(store: hw.Store, name: Any) -> None:
    for call in (store.create_stream, store.stream, store.delete_stream, store.cut):
        with pytest.raises(hw.InvalidRequestError, match="scope/name"):
            call(name)
    assert store.streams() == store.scopes() == []


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", None, 7], ids=repr)
def test_what_can_not_name_a_scope_is_refused(store: hw.Store, name: Any) -> None:
    for call in (store.create_scope, store.delete_scope):
        with pytest.raises(hw.InvalidRequestError, match="scope"):
            call(name)
    assert store.scopes() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "tables"}, "kind"),
        ({"kind": None}, "kind"),
        ({"labels": "red"}, "labels"),
        ({"labels": ["a b"]}, "label"),
        ({"labels": [7]}, "label"),
        ({"scaling": 3}, "hw.Scaling"),
        ({"retention": 7}, "hw.Retention"),
        ({"schema": {"a": "int64"}}, "pyarrow.Schema"),
        ({"schema": pa.schema([])}, "at least one column"),
        ({"schema": pa.schema([("_key", pa.int64())])}, "'_key'"),
        ({"schema": pa.schema([("at", pa.timestamp("us", "Nowhere/X"))])}, "'Nowhere/X' is no time zone"),
        ({"schema": pa.schema([("value", pa.binary()), ("l", pa.list_(pa.int32(), 0))])}, "size 0"),
        ({"schema": pa.schema([("value", pa.binary()), ("d", pa.decimal128(5, -2))])}, "scale"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_and_nothing_is_made(store: hw.Store, options: dict[str, Any], said: str) -> None:
    with pytest.raises(hw.InvalidRequestError, match=said):
        store.create_stream("a/x", **options)
    assert store.streams() == store.scopes() == []
    if "kind" not in options:
        stream = store.create_stream("a/x")
        with pytest.raises(hw.InvalidRequestError, match=said):
            stream.update(**options)


# Values that could not be read, or not be moved to chunks.


def numbers(kind: pa.DataType, number: int) -> pa.Array:
    """Two values of a type by the number that Arrow stores, unchecked: 0 and this one."""
    return pa.array([0, number], pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)


@pytest.mark.parametrize(
    ("kind", "number", "said"),
    [
        (pa.date32(), 2**30, "years 1 to 9999"),
        (pa.date64(), 86_400_000 * 2**30, "years 1 to 9999"),
        (pa.date64(), 1, "whole number of days"),
        (pa.time32("s"), -5, "acceptable range"),
        (pa.time32("s"), 2**31 - 1, "acceptable range"),
        (pa.time64("us"), 2**61, "acceptable range"),
        (pa.timestamp("s"), 2**61, "years 1 to 9999"),
        (pa.timestamp("ms"), 2**61, "years 1 to 9999"),
        (pa.timestamp("us", "UTC"), -(2**61), "years 1 to 9999"),
        (pa.timestamp("s", "Pacific/Auckland"), 253_402_300_799, "years 1 to 9999 of its zone"),
        (pa.duration("s"), 2**61, "Python's durations"),
        (pa.duration("ms"), -(2**61), "Python's durations"),
    ],
    ids=str,
)
def test_times_that_no_reader_could_get_are_refused(store: hw.Store, kind: pa.DataType, number: int, said: str) -> None:
    bad = numbers(kind, number)
    columns = [
        (bad, number),
        (pa.ListArray.from_arrays([0, 1, 2], bad), [number]),
        (pa.FixedSizeListArray.from_arrays(bad, 1), [number]),
        (pa.StructArray.from_arrays([bad], ["x"]), {"x": number}),
        (pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), bad), {"a": number}),
    ]
    for place, (column, value) in enumerate(columns):
        table = pa.table({"c": column})
        stream = store.create_stream(f"a/{place}", schema=table.schema)
        with stream.writer() as writer, store.transaction() as tx:
            batches = writer.write_batch, partial(tx.write_batch, stream.name)
            rows = writer.write, partial(tx.write, stream.name)
            for give, given in (*((give, table) for give in batches), *((give, {"c": value}) for give in rows)):
                with pytest.raises(hw.InvalidRequestError, match=f"column 'c.*{number}.*{said}"):
                    give(given)
            writer.write_batch(table.slice(0, 1))
        assert stream.to_arrow(columns=["c"]).equals(table.slice(0, 1))
        assert len(list(stream.read())) == 1
    assert store.run_upkeep().problems == () and check_store(store).ok


def test_text_that_is_not_utf_8_is_refused(store: hw.Store) -> None:
    for place, kind in enumerate([pa.string(), pa.large_string()]):
        bad = pa.array([b"a", b"\xff\xfe"], pa.binary() if kind == pa.string() else pa.large_binary()).view(kind)
        views = pa.array([b"a", b"\xff\xfe"], pa.binary_view()).view(pa.string_view())
        schema = pa.schema([("c", kind), ("l", pa.list_(kind)), ("s", pa.struct([("x", kind)]))])
        stream = store.create_stream(f"a/{place}", schema=schema)
        with stream.writer() as writer:
            for name, column in (
                ("c", bad),
                ("c", pa.DictionaryArray.from_arrays([0, 1], bad)),
                ("c", views),
                ("l", pa.ListArray.from_arrays([0, 1, 2], bad)),
                ("s", pa.StructArray.from_arrays([bad], ["x"])),
            ):
                with pytest.raises(hw.InvalidRequestError, match=f"column '{name}.*Invalid UTF8 sequence"):
                    writer.write_batch(pa.table({name: column}), missing="null")
                writer.write_batch(pa.table({name: column.slice(0, 1)}), missing="null")
            with pytest.raises(hw.InvalidRequestError, match="column 'c'"):
                writer.write({"c": "\ud800"})
        assert len(list(stream.read())) == 5
    assert store.run_upkeep().problems == () and check_store(store).ok


def test_columns_that_are_not_valid_as_arrow_data_are_refused(store: hw.Store) -> None:
    places = pa.array([0, 5, 2, 6], pa.int32()).buffers()[1]
    crossed = pa.Array.from_buffers(pa.binary(), 3, [None, places, pa.py_buffer(b"abcdef")])
    lists = pa.Array.from_buffers(pa.list_(pa.int8()), 3, [None, places], children=[pa.array(range(6), pa.int8())])
    digits = pa.Array.from_buffers(pa.decimal128(7, 2), 1, pa.array([10**9], pa.decimal128(12, 0)).buffers())
    indices = pa.DictionaryArray.from_arrays(pa.array([0, 7], pa.int8()), pa.array(["a", "b"]), safe=False)
    opaque = store.create_stream("a/opaque")
    typed = store.create_stream("a/typed", schema=pa.schema([("l", pa.list_(pa.int8())), ("d", pa.decimal128(7, 2)), ("s", pa.string())]))
    with opaque.writer() as writer, typed.writer() as typed_writer:
        for give, table, said in (
            (writer.write_batch, pa.table({"value": crossed}), "column 'value'.*offset"),
            (partial(typed_writer.write_batch, missing="null"), pa.table({"l": lists}), "column 'l'.*offset"),
            (partial(typed_writer.write_batch, missing="null"), pa.table({"l": lists.slice(1)}), "column 'l'.*offset"),
            (partial(typed_writer.write_batch, missing="null"), pa.table({"d": digits}), "column 'd'.*precision"),
            (partial(typed_writer.write_batch, missing="null"), pa.table({"s": indices}), "column 's'.*out of bounds"),
        ):
            with pytest.raises(hw.InvalidRequestError, match=said):
                give(table)
        for keys in (crossed, indices):
            with pytest.raises(hw.InvalidRequestError, match="column 'k'"):
                writer.write_batch(pa.table({"value": pa.array([b"x"] * len(keys)), "k": keys}), key="k")
    assert list(opaque.read()) == list(typed.read()) == []


def test_the_nulls_of_a_dictionary_are_refused_where_there_may_be_none(store: hw.Store) -> None:
    stream = store.create_stream("a/x", schema=pa.schema([pa.field("s", pa.string(), nullable=False)]))
    column = pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", None]))
    with stream.writer() as writer, pytest.raises(hw.InvalidRequestError, match="column 's' has 1 nulls, and is not nullable"):
        writer.write_batch(pa.table({"s": column}), missing="null")


# What goes into the catalog.


ODD_CALLS: dict[str, Callable[[hw.Store], object]] = {
    "streams(scope=NUL)": lambda store: store.streams(scope="a\0"),
    "streams(scope=object)": lambda store: store.streams(scope=object()),  # type: ignore[arg-type]
    "streams(label=NUL)": lambda store: store.streams(label="a\0"),
    "streams(label=surrogate)": lambda store: store.streams(label="\ud800"),
    "tables(NUL)": lambda store: store.tables("a\0"),
    "marker(NUL)": lambda store: store.marker("a\0"),
    "marker(surrogate)": lambda store: store.marker("\ud800"),
    "marker(int)": lambda store: store.marker(5),  # type: ignore[arg-type]
    "transactions(-1)": lambda store: store.transactions(-1),
    "transactions(huge)": lambda store: store.transactions(1 << 70),
    "transactions(text)": lambda store: store.transactions("x"),  # type: ignore[arg-type]
    "hold(huge)": lambda store: store.hold("h", store.stream("a/x").head(), store.stream("a/x").tail(), 1e300),
    "hold(nan)": lambda store: store.hold("h", store.stream("a/x").head(), store.stream("a/x").tail(), math.nan),
    "hold(inf)": lambda store: store.hold("h", store.stream("a/x").head(), store.stream("a/x").tail(), math.inf),
    "adopt(NUL)": lambda store: store.transaction().adopt(["a\0"]),
    "adopt(surrogate)": lambda store: store.transaction().adopt(["\ud800"]),
    "adopt(many)": lambda store: store.transaction().adopt(["a"] * 70_000),
}


def test_what_no_catalog_can_look_for_is_refused(place: Place) -> None:
    with place.open(create=True) as store:
        store.create_stream("a/x")
        for name, call in ODD_CALLS.items():
            try:
                call(store)
            except hw.InvalidRequestError:
                continue
            except Exception as error:
                raise AssertionError(f"{name} raised {error!r}") from error
            raise AssertionError(f"{name} raised nothing")
        assert store.streams() == ["a/x"]
