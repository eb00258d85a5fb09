"""Files of every format become the same events; what is no event is named by file and line, or put aside."""

from __future__ import annotations

import csv
import gzip
import io
import json
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headwater as hw
from headwater.ingest import formats, ingest, text
from headwater.ingest.pieces import Position
from headwater.ingest.sources import find_files
from headwater.ingest.target import Target

SCHEMA = pa.schema(
    [
        pa.field("user", pa.string(), nullable=False),
        pa.field("n", pa.int64()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
    ]
)
NOON = datetime(2031, 5, 1, 12, tzinfo=UTC)
ROWS: list[dict[str, Any]] = [
    {"user": "ann", "n": 1, "at": NOON},
    {"user": 'b "the" b', "n": None, "at": NOON},
    {"user": "line\nfeed", "n": -3, "at": None},
]


@pytest.fixture
def store() -> Iterator[hw.Store]:
    with hw.open(f"memory://{uuid.uuid4().hex}", upkeep=False) as store:
        yield store


@pytest.fixture
def rows(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/rows", schema=SCHEMA)


def values(store: hw.Store, name: str = "a/rows") -> list[Any]:
    return [event.value for event in store.stream(name).read()]


def write_csv(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def write_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()


def write_avro(rows: list[dict[str, Any]]) -> bytes:
    schema = {
        "type": "record",
        "name": "row",
        "fields": [
            {"name": "user", "type": "string"},
            {"name": "n", "type": ["null", "long"]},
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        ],
    }
    out = io.BytesIO()
    fastavro.writer(out, schema, rows)
    return out.getvalue()


def write_parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), out, row_group_size=2)
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


FILES = {
    "x.csv": write_csv(ROWS),
    "x.tsv": write_csv(ROWS).replace(b",", b"\t"),
    "x.csv.gz": gzip.compress(write_csv(ROWS)),
    "x.csv.zst": zstd(write_csv(ROWS)),
    "crlf.csv": write_csv(ROWS[:2]).replace(b"\n", b"\r\n") + b'"line\nfeed",-3,\r\n',
    "mark.csv": b"\xef\xbb\xbf" + write_csv(ROWS),
    "no_last_feed.csv": write_csv(ROWS).removesuffix(b"\n"),
    "blank_lines.csv": write_csv(ROWS[:1]) + b"\n\r\n" + write_csv(ROWS[1:]).partition(b"\n")[2],
    "other_order.csv": write_csv([{"at": row["at"], "user": row["user"], "n": row["n"]} for row in ROWS]),
    "x.jsonl": write_jsonl(ROWS),
    "x.json": write_jsonl(ROWS),
    "x.ndjson.gz": gzip.compress(write_jsonl(ROWS)) + gzip.compress(b""),
    "mark.jsonl": b"\xef\xbb\xbf" + write_jsonl(ROWS).replace(b"\n", b"\r\n"),
    "blank.jsonl": b"\n \n" + write_jsonl(ROWS).replace(b"\n", b"\n\t\n").rstrip(),
    "x.parquet": write_parquet(ROWS),
    "x.avro": write_avro(ROWS),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("limit", [None, 1])
def test_each_format_gives_the_same_rows(store: hw.Store, rows: hw.Stream, tmp_path: Path, name: str, limit: int | None) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    report = ingest(store, tmp_path, "a/rows", events_per_transaction=limit)
    assert values(store) == ROWS
    assert (report.files, report.events, report.bytes) == (1, 3, len(FILES[name]))
    assert report.transactions == (1 if limit is None else 4 if limit == 1 else 2)
    assert ingest(store, tmp_path, "a/rows").events == 0 and len(values(store)) == 3


@pytest.mark.parametrize("name", [name for name in FILES if "order" not in name])
def test_a_stream_that_is_missing_gets_the_schema_that_the_file_suggests(store: hw.Store, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    ingest(store, tmp_path, "a/rows", key="user", time="at", segments=3)
    stream = store.stream("a/rows")
    assert len(stream.segments()) == 3
    assert {field.name: field.type for field in stream.schema} == {field.name: field.type for field in SCHEMA}
    events = {event.key: event for event in stream.read()}
    assert set(events) == {b"ann", b'b "the" b', b"line\nfeed"}
    assert events[b"ann"].time == NOON and events[b"ann"].value == ROWS[0]


def test_plain_lines_are_events_of_a_stream_without_a_schema(store: hw.Store, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n\xff\xfe\nlast")
    (tmp_path / "b.log").write_bytes(b"\xef\xbb\xbfmarked\n")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed\n"))
    assert ingest(store, tmp_path, "a/lines").events == 6
    assert values(store, "a/lines") == [b"one", b"", b"\xff\xfe", b"last", b"marked", b"packed"]


def test_json_lines_go_to_a_stream_without_a_schema_as_they_are(store: hw.Store, tmp_path: Path) -> None:
    store.create_stream("a/lines")
    (tmp_path / "a.jsonl").write_bytes(b'{"u": 7,  "at": "2031-05-01T12:00"}\n\n{"u": "x", "at": 60, "more": [1]}\n')
    ingest(store, tmp_path, "a/lines", key="u", time="at")
    first, second = store.stream("a/lines").read()
    assert (first.value, first.key, first.time) == (b'{"u": 7,  "at": "2031-05-01T12:00"}', b"7", NOON)
    assert (second.key, second.time) == (b"x", datetime(1970, 1, 1, 0, 1, tzinfo=UTC))


def test_types_are_inferred_sensibly(store: hw.Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("i,f,b,d,t,z,s,empty\n1,1.5,true,2031-05-01,2031-05-01 12:00:00.5,2031-05-01T12:00:00+02:00,x,\n")
    ingest(store, tmp_path / "a.csv", "a/csv")
    row = values(store, "a/csv")[0]
    assert row == {
        "i": 1,
        "f": 1.5,
        "b": True,
        "d": date(2031, 5, 1),
        "t": NOON.replace(microsecond=500_000),
        "z": NOON.replace(hour=10),
        "s": "x",
        "empty": "",
    }
    (tmp_path / "a.jsonl").write_text('{"i": 1, "t": "2031-05-01T12:00:00.25Z", "o": {"l": [1, null]}, "none": null, "e": []}\n')
    ingest(store, tmp_path / "a.jsonl", "a/json")
    row = values(store, "a/json")[0]
    assert row == {"i": 1, "t": NOON.replace(microsecond=250_000), "o": {"l": [1, None]}, "none": None, "e": []}


def test_a_given_schema_makes_the_stream_and_reads_text_by_it(store: hw.Store, tmp_path: Path) -> None:
    schema = pa.schema([("price", pa.decimal128(10, 2)), ("day", pa.date32()), ("at", pa.time64("us")), ("code", pa.string())])
    (tmp_path / "a.csv").write_text("code,price,day,at\n007,1.20,2031-05-01,12:30:00\n")
    (tmp_path / "b.jsonl").write_text('{"code": "008", "price": "1.30", "day": "2031-05-02", "at": "12:31:00"}\n')
    ingest(store, tmp_path, "a/prices", schema=schema)
    first, second = values(store, "a/prices")
    assert (first["price"], first["day"], first["code"]) == (Decimal("1.20"), date(2031, 5, 1), "007")
    assert (second["price"], second["day"], second["at"].minute) == (Decimal("1.30"), date(2031, 5, 2), 31)


def test_csv_without_a_header_has_the_columns_of_the_stream(store: hw.Store, rows: hw.Stream, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ann;1;2031-05-01 12:00\n")
    ingest(store, tmp_path, "a/rows", header=False, delimiter=";")
    assert values(store) == [ROWS[0]]


@pytest.mark.parametrize("data", [b"", b"\n", b"user,n,at", b"user,n,at\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_done_with_and_makes_no_stream(store: hw.Store, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(data)
    assert ingest(store, tmp_path, "a/rows").files == 1
    assert store.streams() == []
    (tmp_path / "b.csv").write_bytes(write_csv(ROWS))
    report = ingest(store, tmp_path, "a/rows")
    assert (report.files, report.files_before) == (1, 1) and values(store) == ROWS


# What is no event.

BAD = [
    ("a.csv", b"user,n,at\nann,1,\nbob,x,\n", "line 3", "column 'n': can't become int64: invalid value 'x'"),
    ("a.csv", b"user,n,at\nann,1,\nbob,1\n", "line 3", "Expected 3 columns, got 2"),
    ("a.csv", b'user,n,at\n"a\nb",1,\nbob,1,,\n', "line 4", "Expected 3 columns, got 4"),
    ("a.csv", b"user,n,at\nann,1,noon\n", "line 2", "the column 'at' takes timestamp[us, tz=UTC]"),
    ("a.csv", b"user,n,at\nann,1,\n\xff,1,\n", "line 3", "column 'user': can't become string: invalid UTF8 data"),
    ("a.csv", b'user,n,at\nann,1,\n"bob,1,\ncy,2,\n', "line 3", "a quote is opened and not closed"),
    ("a.csv", b"n,user,at\n1,ann,\n99999999999999999999,bob,\n", "line 3", "column 'n': can't become int64"),
    ("a.csv.gz", gzip.compress(b"user,n,at\nann,1,\nbob,x,\n"), "line 3", "column 'n'"),
    ("a.jsonl", b'{"user": "ann"}\nnot json\n', "line 2", "not JSON"),
    ("a.jsonl", b'{"user": "ann"}\n\n{"user": "x"}{"user": "y"}\n', "line 3", "not JSON|not one JSON object"),
    ("a.jsonl", b'{"user": "ann"}\n[1]\n', "line 2", "not a JSON object but list"),
    ("a.jsonl", b'{"user": "ann"}\n{"n": 1}\n', "line 2", "the column 'user' is missing or null, and is never null"),
    ("a.jsonl", b'{"user": "ann"}\n{"user": "b", "m": 1}\n', "line 2", "no column is called 'm'"),
    ("a.jsonl", b'{"user": "ann"}\n{"user": "b", "n": 1.5}\n', "line 2", "Failed to convert JSON to int64"),
    ("a.jsonl", b'{"user": "ann"}\n{"user": "\xff"}\n', "line 2", "Invalid UTF8"),
    ("a.jsonl", b'{"user": "ann"}\n{"user": 5}', "line 2", "changed from string to number"),
]


@pytest.mark.parametrize(("name", "data", "place", "reason"), BAD, ids=[f"{case[0]}: {case[3]}" for case in BAD])
def test_a_bad_row_is_named_and_nothing_of_its_transaction_is_stored(
    store: hw.Store, rows: hw.Stream, tmp_path: Path, name: str, data: bytes, place: str, reason: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(hw.InvalidRequestError) as caught:
        ingest(store, tmp_path, "a/rows")
    facts = caught.value.facts
    assert (facts["path"], facts["place"]) == (str(tmp_path / name), place)
    assert any(part in facts["reason"] for part in reason.split("|")), facts["reason"]
    assert f"{tmp_path / name}, {place}: " in str(caught.value)
    assert values(store) == []
    assert not store.transactions(only_open=True), "nothing is left open"


@pytest.mark.parametrize(("name", "data", "place", "reason"), BAD, ids=[f"{case[0]}: {case[3]}" for case in BAD])
def test_bad_rows_go_to_a_stream_of_their_own(
    store: hw.Store, rows: hw.Stream, tmp_path: Path, name: str, data: bytes, place: str, reason: str
) -> None:
    (tmp_path / name).write_bytes(data)
    report = ingest(store, tmp_path, "a/rows", bad_rows="a/dead")
    (letter,) = (json.loads(value) for value in values(store, "a/dead"))
    assert (letter["file"], letter["place"]) == (str(tmp_path / name), place)
    assert any(part in letter["reason"] for part in reason.split("|")) and letter["text"]
    assert (report.bad_rows, report.events) == (1, len(values(store)))
    assert ingest(store, tmp_path, "a/rows", bad_rows="a/dead").bad_rows == 0 and len(values(store, "a/dead")) == 1


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"f,d\n0.5,inf\n1e300,1\n"),
        ("a.csv", b"f,d\n-Infinity,1\n1,-1e400\n"),
        ("a.jsonl", b'{"f": 0.5, "d": 1e300}\n{"f": 1e300}\n'),
        ("a.parquet", pa.table({"f": [0.5, 1e300]})),
    ],
    ids=["csv float", "csv double", "json", "parquet"],
)
def test_a_number_that_would_become_infinite_is_a_bad_row(store: hw.Store, tmp_path: Path, name: str, data: bytes | pa.Table) -> None:
    path = tmp_path / name
    pq.write_table(data, path) if isinstance(data, pa.Table) else path.write_bytes(data)
    store.create_stream("a/rows", schema=pa.schema([("f", pa.float32()), ("d", pa.float64())]))
    assert ingest(store, path, "a/rows", bad_rows="a/dead").bad_rows == 1
    (letter,) = (json.loads(value) for value in values(store, "a/dead"))
    assert "would become infinite" in letter["reason"] and len(values(store)) == 1


def test_rows_of_parquet_with_values_that_no_reader_could_get_are_bad_rows(store: hw.Store, tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us")), ("tags", pa.list_(pa.string()))])
    store.create_stream("a/rows", schema=schema)
    times = pa.array([0, 2**61, 0, 0]).view(pa.timestamp("us"))
    tags = pa.ListArray.from_arrays([0, 1, 2, 3, 4], pa.array([b"a", b"b", b"\xff", b"d"]).view(pa.string()))
    pq.write_table(pa.table([pa.array(range(4)), times, tags], schema=schema), tmp_path / "a.parquet")
    with pytest.raises(hw.InvalidRequestError, match=r"row 2: .*'at'.* years 1 to 9999"):
        ingest(store, tmp_path, "a/rows")
    assert ingest(store, tmp_path, "a/rows", bad_rows="a/dead").bad_rows == 2
    assert [row["n"] for row in values(store)] == [0, 3]
    letters = [json.loads(value) for value in values(store, "a/dead")]
    assert [letter["place"] for letter in letters] == ["row 2", "row 3"]
    assert letters[0]["text"] == "{'n': 1, 'at': '<timestamp[us]>', 'tags': ['b']}"


def test_good_rows_around_bad_ones_keep_their_order_wherever_a_transaction_ends(store: hw.Store, tmp_path: Path) -> None:
    lines = [f"{number}\n" if number % 7 else f"bad {number}\n" for number in range(100)]
    for limit in (1, 3, 7, 50, 1000):
        name = f"a/rows{limit}"
        store.create_stream(name, schema=pa.schema([("n", pa.int64())]))
        (tmp_path / "a.csv").write_text("n\n" + "".join(lines))
        report = ingest(store, tmp_path, name, bad_rows=f"a/dead{limit}", events_per_transaction=limit)
        assert [row["n"] for row in values(store, name)] == [number for number in range(100) if number % 7]
        letters = [json.loads(value) for value in values(store, f"a/dead{limit}")]
        assert [letter["text"] for letter in letters] == [f"bad {number}" for number in range(0, 100, 7)]
        assert [letter["place"] for letter in letters] == [f"line {number + 2}" for number in range(0, 100, 7)]
        assert (report.events, report.bad_rows) == (85, 15)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv.gz", gzip.compress(write_csv(ROWS * 1000))[:-10], "can't be read: Truncated"),
        ("a.csv.zst", zstd(write_csv(ROWS * 1000))[:-3], "can't be read: Truncated"),
        ("a.csv.gz", b"no gzip at all", "can't be read: zlib"),
        ("a.parquet", b"no parquet at all", "can't be read: Parquet"),
        ("a.parquet", write_parquet(ROWS)[:-30], "can't be read"),
        ("a.avro", b"no avro at all", "can't be read"),
        ("a.avro", write_avro(ROWS * 1000)[:-40], "can't be read"),
    ],
    ids=["gzip cut off", "zstd cut off", "no gzip", "no Parquet", "Parquet cut off", "no Avro", "Avro cut off"],
)
def test_a_damaged_file_ends_it_and_nothing_of_it_is_stored(
    store: hw.Store, rows: hw.Stream, tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / "0.csv").write_bytes(write_csv(ROWS))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(hw.UnavailableError, match=said) as caught:
        ingest(store, tmp_path, "a/rows", bad_rows="a/dead")
    assert str(tmp_path / name) in str(caught.value)
    assert values(store) == ROWS, "the file before it is stored"


@pytest.mark.parametrize(
    ("name", "data", "options", "said"),
    [
        ("a.csv", b"user,m\nann,1\n", {}, "a.csv: the stream has no column 'm'; the stream has user: string"),
        ("a.csv", b"n\n1\n", {}, "it lacks 'user', which is never null"),
        ("a.csv", b"user,user\na,b\n", {}, "has a column twice"),
        ("a.csv", write_csv(ROWS), {"key": "nobody"}, "the stream has no column 'nobody'"),
        ("a.csv", write_csv(ROWS), {"key": "at"}, "a routing key is text, bytes or a whole number"),
        ("a.csv", write_csv(ROWS), {"delimiter": "::"}, "one ASCII character"),
        ("a.csv", write_csv(ROWS), {"format": "lines"}, "plain lines go to a stream without a schema"),
        ("a.csv", write_csv(ROWS), {"bad_rows": "a/rows"}, "has a schema"),
        ("a.csv", write_csv(ROWS), {"events_per_transaction": 0}, "at least one"),
        ("a.csv", write_csv(ROWS), {"name": "no/word"}, "can't name"),
        ("a.csv", write_csv(ROWS), {"format": "xml"}, "no format is called 'xml'"),
        ("a.xml", b"<a/>", {}, "its name does not say what is in it"),
        ("a.parquet.gz", b"", {}, "are compressed inside"),
    ],
)
def test_what_can_not_work_is_refused_in_one_sentence(
    store: hw.Store, rows: hw.Stream, tmp_path: Path, name: str, data: bytes, options: dict[str, Any], said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(hw.InvalidRequestError, match=said):
        ingest(store, tmp_path, "a/rows", **options)
    assert values(store) == []


def test_sources_are_files_folders_and_patterns(store: hw.Store, tmp_path: Path) -> None:
    for name in ("in/a.txt", "in/deep/b.txt", "in/deep/c.log", "in/.hidden.txt", "in/_SUCCESS", "in/_temporary/d.txt", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")

    def ingested(stream: str, *sources: str) -> list[str]:
        ingest(store, [tmp_path / source for source in sources], stream)
        return [value.decode() for value in values(store, stream)]

    assert ingested("a/folder", "in") == ["in/a.txt", "in/deep/b.txt", "in/deep/c.log"]
    assert ingested("a/pattern", "in/**/[a-z]*.txt", "e.txt", "e.txt") == ["e.txt", "in/_temporary/d.txt", "in/a.txt", "in/deep/b.txt"]
    for missing in ("nothing.txt", "*.csv"):
        with pytest.raises(hw.NotFoundError, match=missing.replace("*", r"\*")):
            ingest(store, tmp_path / missing, "a/b")


def test_a_row_as_large_as_no_event_may_be_is_refused(store: hw.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "EVENT_BYTES", 1000)
    monkeypatch.setattr(text, "PIECE_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(b"short\n" + b"x" * 2000)
    with pytest.raises(hw.InvalidRequestError, match=r"a\.txt: a row has over 1,000 bytes"):
        ingest(store, tmp_path, "a/b")


# Pieces: whatever their size, and wherever reading goes on, the rows are the same.

FIELD = st.text(st.sampled_from('ab,"\n\r é'), max_size=6)


def _read(path: Path, start: Position, target: Target) -> Iterator[Any]:
    (file,) = find_files([path], None)
    return formats.read_file(file, start, target, formats.Dialect(), keep_bad=True)


@given(rows=st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=12), size=st.integers(1, 40), cut=st.integers(0, 12))
def test_csv_is_the_same_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], size: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).writerows([("a", "b"), *rows])
    _check_pieces(path, [{"a": a, "b": b} for a, b in rows], size, cut)


@given(
    texts=st.lists(st.sampled_from(["a", '5" nail', 'x"', '"q,q"', '"a\nb"', '"d""d"', '""']), min_size=1, max_size=12),
    size=st.integers(1, 20),
)
def test_quotes_within_a_text_are_part_of_it(tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    path.write_text("a,b\n" + "".join(f"{text},z\n" for text in texts))
    plain = [text[1:-1].replace('""', '"') if text.startswith('"') else text for text in texts]
    _check_pieces(path, [{"a": text, "b": "z"} for text in plain], size, 0)


def _check_pieces(path: Path, rows: list[dict[str, str]], size: int, cut: int) -> None:
    target = Target(pa.schema([("a", pa.string()), ("b", pa.string())]), None, None)
    before = text.PIECE_BYTES
    try:
        text.PIECE_BYTES = size
        pieces = list(_read(path, Position(), target))
        assert [row for piece in pieces for row in piece.batch.to_pylist()] == rows
        # From the middle of a piece, in pieces of another size.
        seen = 0
        for piece in pieces:
            if seen + piece.rows > cut:
                middle = piece.cut(cut - seen)[0].end if cut > seen else piece.start
                text.PIECE_BYTES = 3 * size + 1
                rest = [row for other in _read(path, middle, target) for row in other.batch.to_pylist()]
                assert rest == rows[cut:]
                break
            seen += piece.rows
    finally:
        text.PIECE_BYTES = before
