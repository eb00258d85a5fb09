"""What `headwater write` makes of lines: keys, times, numbers, rows, and the line it stops at."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

import headwater as hw
from headwater.cli import main
from headwater.cli.lines import BadLineError, read_lines
from headwater.segments.engine import Engine


def write(url: Path, name: str, input: str | bytes, *arguments: str, code: int = 0) -> Result:
    result = CliRunner(env={"HEADWATER_STORE": str(url)}).invoke(main, ["write", name, *arguments], input=input)
    assert result.exit_code == code, (result.output, result.exception)
    return result


def values(url: Path, name: str) -> list[object]:
    with hw.open(url) as store:
        return [event.value for event in store.stream(name).read()]


@pytest.fixture
def url(tmp_path: Path) -> Path:
    url = tmp_path / "store"
    with hw.open(url) as store:
        store.create_stream("a/lines", scaling=hw.Scaling.fixed(4))
        store.create_stream("a/rows", schema=_schema(), scaling=hw.Scaling.fixed(4))
    return url


def _schema() -> pa.Schema:
    return pa.schema(
        [pa.field("user", pa.string(), nullable=False), pa.field("n", pa.int64()), pa.field("at", pa.timestamp("us", tz="UTC"))]
    )


def _pieces(data: bytes, size: int) -> list[list[bytes]]:
    file = io.BytesIO(data)
    return [lines.to_pylist() for lines in read_lines(file, lambda file: file.read(size))]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("data", [b"", b"\n", b"a", b"a\n", b"a\nbc", b"a\n\nbc\n", b"\n\n\n", b"long line here\nx\n"])
def test_lines_are_the_same_however_the_input_comes_in_pieces(data: bytes, size: int) -> None:
    assert [line for lines in _pieces(data, size) for line in lines] == [line.removesuffix(b"\n") for line in io.BytesIO(data)]


def test_plain_lines_are_events_empty_ones_too(url: Path) -> None:
    result = write(url, "a/lines", b"one\n\n\xff\r\nlast without a line feed")
    assert values(url, "a/lines") == [b"one", b"", b"\xff\r", b"last without a line feed"]
    assert "4 events stored in a/lines" in result.stderr


def test_nothing_to_write_is_fine(url: Path) -> None:
    assert json.loads(write(url, "a/lines", "", "--json").stdout)["stored"] == 0
    assert json.loads(write(url, "a/rows", "\n  \n", "--json").stdout)["stored"] == 0


def test_a_file_is_read_instead_of_standard_input(url: Path, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("one\ntwo\n")
    write(url, "a/lines", "", "--file", str(tmp_path / "input"))
    assert values(url, "a/lines") == [b"one", b"two"]


def test_keys_and_times_come_from_json_fields_of_a_line_that_is_stored_as_it_is(url: Path) -> None:
    write(url, "a/lines", '{"u": "ann", "at": "2031-05-01T12:00:00+02:00"}\n\n{"u": 7, "at": 60}\n', "--key", "u", "--time", "at")
    with hw.open(url) as store:
        events = {event.key: event for event in store.stream("a/lines").read()}
    assert events[b"ann"].value == b'{"u": "ann", "at": "2031-05-01T12:00:00+02:00"}'
    assert events[b"ann"].time.isoformat() == "2031-05-01T10:00:00+00:00"
    assert events[b"7"].time.isoformat() == "1970-01-01T00:01:00+00:00"


def test_a_key_is_found_by_a_regular_expression(url: Path) -> None:
    write(url, "a/lines", "GET /a 200\nPUT /b 500\n", "--key-regex", r"^\w+ (\S+)")
    with hw.open(url) as store:
        assert {event.key for event in store.stream("a/lines").read()} == {b"/a", b"/b"}


def test_rows_come_from_json_lines(url: Path) -> None:
    lines = '{"user": "a", "n": 1, "at": "2031-05-01T00:00:00Z"}\n\n{"n": null, "user": "b"}\n'
    write(url, "a/rows", lines, "--key", "user", "--time", "at")
    with hw.open(url) as store:
        events = {event.key: event for event in store.stream("a/rows").read()}
    assert events[b"a"].value["n"] == 1
    assert events[b"a"].time == events[b"a"].value["at"]
    assert events[b"b"].value == {"user": "b", "n": None, "at": None}


@pytest.mark.parametrize(
    ("stream", "arguments", "line", "said"),
    [
        ("a/lines", ["--key", "u"], "not json", "line 3: not JSON"),
        ("a/lines", ["--key", "u"], "[1]", "line 3: not a JSON object but list"),
        ("a/lines", ["--key", "u"], '{"v": 1}', "line 3: there is no field 'u'"),
        ("a/lines", ["--key", "u"], '{"u": 1.5}', "line 3: the field 'u' is 1.5"),
        ("a/lines", ["--time", "at"], '{"at": "noon"}', "line 3: Invalid isoformat string: 'noon'"),
        ("a/lines", ["--time", "at"], '{"at": true}', "line 3: True is no time"),
        ("a/lines", ["--writer-id", "w", "--number", "n"], '{"n": 0}', "line 3: 0 is no source number"),
        ("a/lines", ["--key-regex", "x"], '{"u": 1}', "line 3: 'x' finds no key in it"),
        ("a/rows", [], "nonsense", "line 3: not JSON"),
        ("a/rows", [], '{"user": "x"}{"user": "y"}', "line 3: not JSON"),
        ("a/rows", [], "null", "line 3: not a JSON object but NoneType"),
        ("a/rows", ["--key", "user"], '{"user": "%s"}' % ("x" * 70_000), "line 3: column 'user' has a routing key of 70,000 bytes"),
        ("a/lines", ["--key", "u"], '{"u": "%s"}' % ("x" * 70_000), "line 3: this routing key has 70,000 bytes"),
        ("a/lines", ["--key-regex", "x+"], "x" * 70_000, "line 3: this routing key has 70,000 bytes"),
        ("a/lines", ["--time", "at"], '{"at": "9999-12-31T23:59:59-23:00"}', "line 3: '9999-12-31T23:59:59-23:00' lies outside"),
        ("a/rows", [], '{"user": "x", "at": "9999-12-31T23:59:59-23:00"}', "line 3: column 'at' has a value that can't be stored"),
        ("a/rows", [], b'{"user": "\xff"}', "line 3: not JSON"),
        ("a/rows", [], '{"user": ' + "[" * 100_000, "line 3: JSON that is nested too deeply"),
        ("a/lines", ["--key", "u"], "[" * 100_000, "line 3: JSON that is nested too deeply"),
        ("a/rows", [], '{"user": "x", "extra": 1}', "line 3: no column is called 'extra'"),
        ("a/rows", [], '{"n": 1}', "line 3: the column 'user' is missing or null"),
        ("a/rows", [], '{"user": null}', "line 3: the column 'user' is missing or null"),
        ("a/rows", [], '{"user": 5}', "line 3: Column(/user) changed from string to number"),
        ("a/rows", [], '{"user": "x", "n": 1.5}', "line 3: Failed to convert JSON to int64"),
        ("a/rows", ["--writer-id", "w", "--number", "n"], '{"user": "x"}', "line 3: None is no source number"),
    ],
)
def test_a_line_that_is_no_event_ends_it_and_those_before_are_stored(
    url: Path, stream: str, arguments: list[str], line: str | bytes, said: str
) -> None:
    good = '{"u": "x", "at": 1, "n": %d}' if stream == "a/lines" else '{"user": "x", "n": %d}'
    text = line if isinstance(line, bytes) else line.encode()
    lines = [(good % 1).encode(), (good % 2).encode(), text, (good % 3).encode()]
    result = write(url, stream, b"\n".join(lines) + b"\n", *arguments, code=1)
    assert said in result.stderr and "events stored before it: 2" in result.stderr
    assert result.stderr.count("\n") == 1
    assert len(values(url, stream)) == 2


def test_an_input_that_is_null_is_no_event(url: Path) -> None:
    assert "line 1: not a JSON object" in write(url, "a/rows", "null\n", code=1).stderr


def test_a_field_that_is_no_column_is_refused_at_once(url: Path) -> None:
    assert "has no column 'x'" in write(url, "a/rows", '{"user": "a"}\n', "--key", "x", code=1).stderr
    assert "--key-regex is for streams without a schema" in write(url, "a/rows", '{"user": "a"}\n', "--key-regex", "x", code=1).stderr


def test_an_input_written_again_from_its_start_is_stored_once(url: Path) -> None:
    lines = [f"line {number}" for number in range(1, 101)]
    write(url, "a/lines", "\n".join(lines[:60]), "--writer-id", "w", "--number", "line")
    result = write(url, "a/lines", "\n".join(lines), "--writer-id", "w", "--number", "line", "--json")
    assert (json.loads(result.stdout)["stored"], json.loads(result.stdout)["skipped"]) == (40, 60)
    assert sorted(map(str, values(url, "a/lines"))) == sorted(str(line.encode()) for line in lines)
    assert (
        "0 events stored in a/lines, 100 skipped" in write(url, "a/lines", "\n".join(lines), "--writer-id", "w", "--number", "line").stderr
    )


@pytest.mark.parametrize("stream", ["a/lines", "a/rows"])
def test_source_numbers_from_a_field_drop_what_was_stored_before(url: Path, stream: str) -> None:
    def line(number: int) -> str:
        return json.dumps({"user": "x", "n": number})

    def numbers() -> list[int]:
        found = values(url, stream)
        return [int((json.loads(value) if isinstance(value, bytes) else value)["n"]) for value in found]  # type: ignore[index]

    # Gaps are fine; a number at or below one before it was stored before.
    write(url, stream, "\n".join(map(line, [10, 20, 20, 15, 30])), "--writer-id", "w", "--number", "n", "--key", "user")
    assert numbers() == [10, 20, 30]
    result = write(url, stream, "\n".join(map(line, [5, 30, 31, 40])), "--writer-id", "w", "--number", "n", "--key", "user", "--json")
    assert numbers() == [10, 20, 30, 31, 40]
    assert json.loads(result.stdout)["skipped"] == 2


def test_one_key_written_by_the_command_and_the_api_lands_in_one_segment(url: Path) -> None:
    write(url, "a/lines", '{"u": 42}\n{"u": "42"}\n', "--key", "u")
    with hw.open(url) as store:
        with store.stream("a/lines").writer() as writer:
            position = writer.write(b"x", key=42).result()
        assert {event.position.segment for event in store.stream("a/lines").read()} == {position.segment}


def test_a_line_longer_than_an_event_may_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.cli.lines.EVENT_BYTES", 100)
    for size in (10, 100):
        assert _pieces(b"y\n" + b"x" * 100 + b"\nz", size)
        with pytest.raises(BadLineError, match="line 2: it has over 100 bytes"):
            _pieces(b"y\n" + b"x" * 101 + b"\nz", size)


def test_a_named_writer_without_numbers_goes_on_after_its_last_one_and_repeats_what_it_is_given_again(url: Path) -> None:
    for _ in range(2):
        write(url, "a/lines", "one\ntwo\n", "--writer-id", "w")
    assert sorted(map(str, values(url, "a/lines"))) == ["b'one'", "b'one'", "b'two'", "b'two'"]
    with hw.open(url) as store, store.stream("a/lines").writer("w") as writer:
        assert writer.last_number == 4
    # A source that counts from where it was told is not repeated.
    write(url, "a/lines", '{"n": 4}\n{"n": 5}\n', "--writer-id", "w", "--number", "n")
    assert len(values(url, "a/lines")) == 5


def _fail_once(patch: pytest.MonkeyPatch, then: Any = None) -> None:
    """The first commit is not to be had."""
    commit, failures = Engine.commit_flush, [then]

    def commit_flush(engine: Engine, flush: Any) -> Any:
        while failures:
            if (then := failures.pop()) is not None:
                then()
            raise hw.UnavailableError("the catalog is out of reach")
        return commit(engine, flush)

    patch.setattr(Engine, "commit_flush", commit_flush)


def test_what_is_stored_by_a_second_try_is_counted(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_once(monkeypatch)
    said = write(url, "a/lines", b"line\n" * 500, code=1).stderr
    assert said == "headwater: the catalog is out of reach; at least 500 events are stored\n"
    assert len(values(url, "a/lines")) == 500


def test_what_is_refused_is_not_counted_as_stored(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seal() -> None:
        with hw.open(url, upkeep=False) as other:
            other.stream("a/lines").seal()

    _fail_once(monkeypatch, then=seal)
    said = write(url, "a/lines", b"line\n" * 500, code=1).stderr
    assert said == "headwater: the catalog is out of reach; at least 0 events are stored\n"
    assert values(url, "a/lines") == []


def test_of_bytes_no_events_are_counted(url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hw.open(url) as store:
        store.create_stream("a/raw", kind="bytes")
    _fail_once(monkeypatch)
    assert write(url, "a/raw", b"raw bytes", code=1).stderr == "headwater: the catalog is out of reach\n"


@pytest.mark.parametrize("line", ['{"f": 1e300}', '{"l": [1, 1e300]}', '{"s": {"f": -1e300}}'])
def test_a_number_too_large_for_its_column_is_refused(url: Path, line: str) -> None:
    schema = pa.schema([("f", pa.float32()), ("l", pa.list_(pa.float32())), ("s", pa.struct([("f", pa.float32())]))])
    with hw.open(url) as store:
        store.create_stream("a/floats", schema=schema)
    good = '{"f": 0.5, "l": [0.25, null], "s": {"f": 2}}'
    said = write(url, "a/floats", f"{good}\n{line}\n", code=1).stderr
    assert "line 2" in said and "would become infinite" in said and "events stored before it: 1" in said
    assert values(url, "a/floats") == [{"f": 0.5, "l": [0.25, None], "s": {"f": 2.0}}]


@pytest.mark.parametrize("kind", [pa.map_(pa.string(), pa.int64()), pa.list_(pa.duration("us")), pa.float16()], ids=str)
def test_a_column_that_json_has_no_form_for_is_refused_before_a_line_is_read(url: Path, kind: pa.DataType) -> None:
    with hw.open(url) as store:
        store.create_stream("a/odd", schema=pa.schema([("odd", kind)]))
    assert "JSON lines can't fill the column 'odd'" in write(url, "a/odd", "{}\n", code=1).stderr


def test_a_line_that_is_too_long_is_named_and_those_before_it_are_stored(url: Path) -> None:
    said = write(url, "a/lines", b"one\ntwo\n" + bytes(64 * 1024 * 1024 + 1) + b"\n", code=1).stderr
    assert said.startswith("headwater: line 3: it has over 67,108,864 bytes") and said.endswith("events stored before it: 2\n")
    assert values(url, "a/lines") == [b"one", b"two"]
