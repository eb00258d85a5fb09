"""Files that nobody should write and somebody does: a row is bad or the run ends with a sentence, never with a traceback or a lie."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headwater as hw
from headwater.ingest import Report, avro, ingest, text
from headwater.model.limits import NESTED_TYPES

NUMBERS = pa.schema([("v", pa.float64())])


@pytest.fixture
def store() -> Iterator[hw.Store]:
    with hw.open(f"memory://{uuid.uuid4().hex}", upkeep=False) as store:
        yield store


def values(store: hw.Store, name: str = "a/b") -> list[Any]:
    return [event.value for event in store.stream(name).read()]


def letters(store: hw.Store) -> list[tuple[str, str]]:
    found = [json.loads(value) for value in values(store, "a/dead")]
    return [(letter["place"], letter["reason"]) for letter in found]


def put_aside(store: hw.Store, path: Path, data: bytes, **options: Any) -> Report:
    path.write_bytes(data)
    return ingest(store, path, "a/b", bad_rows="a/dead", **options)


@pytest.mark.parametrize("line", [b"null", b" null\r", b"5", b'"x"', b"[]", b'[{"v": 1}]', b"{", b"}", b'{"v": 1} null'])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_line_that_is_no_object_is_a_bad_row_wherever_it_is(store: hw.Store, tmp_path: Path, line: bytes, at: int) -> None:
    lines = [b'{"v": 1}', b' {"v": 2} ']
    lines.insert(at, line)
    put_aside(store, tmp_path / "a.jsonl", b"\n".join(lines) + b"\n", schema=NUMBERS)
    assert values(store) == [{"v": 1}, {"v": 2}]
    assert [place for place, _ in letters(store)] == [f"line {at + 1}"]


def test_no_schema_is_guessed_from_lines_that_are_no_objects(store: hw.Store, tmp_path: Path) -> None:
    for line in (b"null\n", b'{"v": 1}\nnull\n'):
        (tmp_path / "a.jsonl").write_bytes(line)
        with pytest.raises(hw.InvalidRequestError, match="no schema fits its first rows: not a JSON object but NoneType"):
            ingest(store, tmp_path, "a/b")


def test_an_object_that_goes_on_in_the_next_line_hides_no_null(store: hw.Store, tmp_path: Path) -> None:
    schema = pa.schema([("v", pa.struct([("w", pa.int64())]))])
    put_aside(store, tmp_path / "a.jsonl", b'{"v": {"w": 1}} null\n{"v":\n{"w": 1}}\n', schema=schema)
    assert values(store) == [] and len(letters(store)) == 3


@pytest.mark.parametrize("deep", [b"[" * 100_000 + b"]" * 100_000, b'{"v": ' * 50_000 + b"1" + b"}" * 50_000, b"[" * 1_000_000])
def test_a_value_nested_deeply_is_a_bad_row_and_no_schema(store: hw.Store, tmp_path: Path, deep: bytes) -> None:
    data = b'{"v": 1}\n{"v": ' + deep + b"}\n"
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(hw.InvalidRequestError, match="no schema fits its first rows"):
        ingest(store, tmp_path, "a/new")
    put_aside(store, tmp_path / "a.jsonl", data, schema=NUMBERS)
    store.create_stream("a/opaque")
    ingest(store, tmp_path / "a.jsonl", "a/opaque", key="v", bad_rows="a/dead")
    assert values(store) == [{"v": 1}] and values(store, "a/opaque") == [b'{"v": 1}']
    assert [place for place, _ in letters(store)] == ["line 2", "line 2"]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"v": ', "}")])
def test_values_nested_as_deeply_as_may_be_are_stored_and_tiered(store: hw.Store, tmp_path: Path, opening: str, closing: str) -> None:
    line = '{"v": ' + opening * NESTED_TYPES + "1" + closing * NESTED_TYPES + "}"
    (tmp_path / "a.jsonl").write_text(line + "\n")
    ingest(store, tmp_path, "a/b")
    store.stream("a/b").seal()
    assert store.run_upkeep().events_tiered
    assert values(store) == [json.loads(line)]


def test_brackets_in_a_text_are_no_levels(store: hw.Store, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"v": '\\"' + "[" * 1000}) + "\n")
    assert ingest(store, tmp_path, "a/b").events == 1


@pytest.mark.parametrize("blank", [b"\n", b"\r\n\r\n", b"  \n\n", b"\n" * 50])
@pytest.mark.parametrize("is_new", [True, False])
def test_blank_lines_before_a_header_are_skipped(
    store: hw.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: bytes, is_new: bool
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 8)
    if not is_new:
        store.create_stream("a/b", schema=pa.schema([("v", pa.int64())]))
    (tmp_path / "a.csv").write_bytes(blank + b"v\n" + b"".join(b"%d\n" % number for number in range(20)) + b"x\n")
    report = ingest(store, tmp_path, "a/b", bad_rows="a/dead", schema=pa.schema([("v", pa.int64())]) if is_new else None)
    assert [row["v"] for row in values(store)] == list(range(20)) and report.events == 20
    assert [place for place, _ in letters(store)] == [f"line {blank.count(bytes([10])) + 22}"]


def test_blank_lines_before_a_header_say_nothing_of_a_schema(store: hw.Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\n\nv,w\n1,x\n")
    ingest(store, tmp_path, "a/b")
    assert values(store) == [{"v": 1, "w": "x"}]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"v\r1\r2\r", "its lines end with CR alone"),
        (b"v\r1\n2\n", "its lines end with CR alone"),
        ("v\n1\n".encode("utf-16"), "the header is no text in UTF-8"),
        ("v\r\n1\r\n".encode("utf-16"), "the header is no text in UTF-8"),
        ("größe\n1\n".encode("latin-1"), "the header is no text in UTF-8"),
    ],
    ids=["CR alone", "CR behind the header", "UTF-16", "UTF-16 with CR LF", "Latin-1"],
)
def test_csv_that_can_not_be_read_is_refused(store: hw.Store, tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    store.create_stream("a/b", schema=NUMBERS)
    for stream in ("a/b", "a/new"):
        with pytest.raises(hw.InvalidRequestError, match=f"a.csv: {said}"):
            ingest(store, tmp_path, stream, bad_rows="a/dead")
    assert values(store) == [] and values(store, "a/dead") == []


def test_a_cr_in_quotes_is_part_of_a_name(store: hw.Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'"v\rw"\r\n1\r\n')
    ingest(store, tmp_path, "a/b")
    assert values(store) == [{"v\rw": 1}]


def test_an_empty_csv_file_before_plain_lines_is_nothing(store: hw.Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.txt").write_text("hi\n")
    assert ingest(store, tmp_path, "a/b").files == 2
    assert values(store) == [b"hi"]


LONG_KEY = '{"k": "%s"}' % ("x" * 70_000)


@pytest.mark.parametrize(
    ("bad", "options"),
    [
        (LONG_KEY, {"key": "k"}),
        ('{"k": "9999-12-31T23:59:59-23:00"}', {"time": "k"}),
        ('{"k": "0001-01-01T00:00:00+10:00"}', {"time": "k"}),
        ('{"k": "\\ud800"}', {"key": "k"}),
    ],
    ids=["a long key", "a late time", "an early time", "half a character"],
)
@pytest.mark.parametrize("schema", [None, pa.schema([("k", pa.string())])], ids=["opaque", "typed"])
def test_keys_and_times_that_no_event_can_have_are_bad_rows(
    store: hw.Store, tmp_path: Path, bad: str, options: dict[str, Any], schema: pa.Schema | None
) -> None:
    store.create_stream("a/b", schema=schema)
    good = '{"k": "2031-05-01T12:00:00Z"}'
    report = put_aside(store, tmp_path / "a.jsonl", f"{good}\n{bad}\n{good}\n".encode(), **options)
    assert (report.events, report.bad_rows) == (2, 1)
    assert [place for place, _ in letters(store)] == ["line 2"]


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (pa.timestamp("s", "UTC"), 253402300800),
        (pa.timestamp("us"), 1 << 62),
        (pa.date32(), 1 << 30),
        (pa.duration("s"), 1 << 60),
        (pa.timestamp("ns", "UTC"), None),
        (pa.duration("ns"), None),
        (pa.time64("ns"), None),
    ],
    ids=str,
)
def test_times_that_python_does_not_have_are_bad_rows_of_parquet(
    store: hw.Store, tmp_path: Path, kind: pa.DataType, number: int | None
) -> None:
    plain = pa.int32() if kind.bit_width == 32 else pa.int64()
    times = pa.array([1, number, 2], plain).cast(kind)
    pq.write_table(pa.table({"at": times, "text": ["x" * 5000] * 3}), tmp_path / "a.parquet")
    report = ingest(store, tmp_path, "a/b", bad_rows="a/dead")
    assert (report.events, report.bad_rows) == ((3, 0) if number is None else (2, 1))
    found = [json.loads(value) for value in values(store, "a/dead")]
    assert [letter["place"] for letter in found] == ["row 2"] * report.bad_rows
    assert all(len(letter["text"]) == 4096 and letter["text"].startswith("{'at': '<") for letter in found)


def test_what_only_the_stream_refuses_is_said_with_the_name_of_the_file(
    store: hw.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise hw.InvalidRequestError("no")

    monkeypatch.setattr(hw.Transaction, "write_batch", refuse)
    (tmp_path / "a.txt").write_text("x\n")
    with pytest.raises(hw.InvalidRequestError, match=r"a\.txt: no"):
        ingest(store, tmp_path, "a/b")


def write_avro(path: Path, kind: Any, *given: Any) -> None:
    schema = {"type": "record", "name": "row", "fields": [{"name": "v", "type": kind}]}
    with path.open("wb") as file:
        fastavro.writer(file, schema, [{"v": value} for value in given])


UUID_TYPE = {"type": "string", "logicalType": "uuid"}
SOME_UUID = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (UUID_TYPE, SOME_UUID, str(SOME_UUID)),
        ({"type": "array", "items": UUID_TYPE}, [SOME_UUID], [str(SOME_UUID)]),
        ({"type": "map", "values": UUID_TYPE}, {"x": SOME_UUID}, [("x", str(SOME_UUID))]),
        ({"type": "record", "name": "inner", "fields": [{"name": "u", "type": UUID_TYPE}]}, {"u": SOME_UUID}, {"u": str(SOME_UUID)}),
    ],
    ids=["plain", "array", "map", "record"],
)
def test_uuids_of_avro_become_text_wherever_they_are(store: hw.Store, tmp_path: Path, kind: Any, value: Any, stored: Any) -> None:
    write_avro(tmp_path / "a.avro", kind, value)
    ingest(store, tmp_path, "a/b")
    assert values(store) == [{"v": stored}]


def test_avro_that_no_column_can_hold_is_refused(store: hw.Store, tmp_path: Path) -> None:
    store.create_stream("a/b", schema=pa.schema([("v", pa.decimal128(10, 2))]))
    write_avro(tmp_path / "a.avro", {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2}, Decimal("1.25"))
    for stream in ("a/b", "a/new"):
        with pytest.raises(hw.InvalidRequestError, match=r"a\.avro: v: a decimal of 50 digits can't be a column"):
            ingest(store, tmp_path, stream)


def test_rows_of_avro_that_arrow_does_not_take_are_named(store: hw.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: object) -> list[dict[str, Any]]:
        return [{"v": 1}, {"v": object()}]

    write_avro(tmp_path / "a.avro", "long", 1)
    monkeypatch.setattr(avro, "_next_rows", rows)
    with pytest.raises(hw.InvalidRequestError, match=r"a\.avro, rows 1 to 2: "):
        ingest(store, tmp_path, "a/b")


def test_names_that_are_no_text_are_names_of_no_column(store: hw.Store, tmp_path: Path) -> None:
    put_aside(store, tmp_path / "a.jsonl", b'{"v": 1}\n{"\\ud800": 1}\n', schema=NUMBERS)
    assert values(store) == [{"v": 1}] and len(letters(store)) == 1
    for option in ("key", "time"):
        with pytest.raises(hw.InvalidRequestError, match="the stream has no column"):
            ingest(store, tmp_path, "a/b", name="again", **{option: "\udcff"})  # type: ignore[arg-type]
