"""The commands, run in this process: what they answer to people and to machines, and how they end."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

import headwater as hw
from headwater import check
from headwater.check import inventory
from headwater.cli import COMMANDS, main
from tests.docs.operations import import_all

Run = Callable[..., Result]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def run(url: str) -> Run:
    """Run a command on a store of this test's own; the test fails if it ends otherwise than with `code`."""

    def run(*arguments: str, code: int = 0, input: str | bytes | None = None) -> Result:
        result = CliRunner(env={"HEADWATER_STORE": url, "HEADWATER_CATALOG": None}).invoke(main, arguments, input=input)
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_help_lists_every_command_and_what_it_does() -> None:
    with click.Context(main) as context:
        for name, (_, text) in COMMANDS.items():
            command = main.get_command(context, name)
            assert command is not None and command.name == name
            assert (command.help or "").split()[0] == text.split()[0], name
    assert "Verify every block" in CliRunner().invoke(main, ["--help"]).stdout


NOT_ON_A_STORE = ("demo", "operations", "journal", "completion", "pipeline")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in NOT_ON_A_STORE])
def test_every_command_takes_a_store_and_json(name: str) -> None:
    text = CliRunner().invoke(main, [name, "--help"]).stdout
    assert "--store" in text and "--catalog" in text and "--json" in text


def test_every_operation_is_listed_with_its_right(run: Run) -> None:
    command = [sys.executable, "-m", "headwater", "operations", "--json"]
    listed = list(map(json.loads, subprocess.run(command, check=True, capture_output=True).stdout.splitlines()))
    import_all()
    assert [tuple(row.values()) for row in listed] == check.list_operations(), "the command knows them without importing every module"
    assert {"name": "tags.get_pins", "runs_as": "statement", "repeatable": True, "right": "read stream"} in listed
    assert [line.split()[0] for line in run("operations").stdout.splitlines()[2:] if line.strip()] == [row["name"] for row in listed]


def test_a_stream_is_made_listed_and_described(run: Run, url: str) -> None:
    assert "with 2 segments" in run("create", "app/log", "--segments", "2", "--label", "web", "--label", "raw").stdout
    run("create", "other/x")
    run("write", "app/log", input="one\ntwo\n")
    assert "app/log" in run("list").stdout
    [row] = objects(run("list", "--json", "--label", "web"))
    assert row["bytes"] > 0
    assert {**row, "bytes": 0} == {
        "name": "app/log",
        "kind": "events",
        "events": 2,
        "bytes": 0,
        "chunks": 0,
        "chunk_bytes": 0,
        "segments": 2,
        "epoch": 0,
        "sealed": False,
        "labels": ["raw", "web"],
        "claimed_by": None,
    }
    assert [row["name"] for row in objects(run("list", "--json", "--scope", "other"))] == ["other/x"]
    [store] = objects(run("describe", "--json"))
    assert (store["store"], store["events"], store["segments"]) == (url, 2, 3)
    assert store["catalog"] == "sqlite" and store["catalog_bytes"] > 0 and len(store["streams"]) == 2
    assert "format" in run("describe").stdout


def test_more_streams_are_listed_than_are_looked_up_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"app/s{number}" for number in range(5)]
    for name in names:
        run("create", name, "--label", name[-1])
    monkeypatch.setattr(inventory, "_AT_ONCE", 2)
    assert [(row["name"], row["labels"]) for row in objects(run("list", "--json"))] == [(name, [name[-1]]) for name in names]


def test_a_stream_is_described_with_its_schema_segments_and_writers(run: Run) -> None:
    run("create", "app/rows", "--schema", "user:string!,n:int64", "--segments", "2")
    run("write", "app/rows", "--writer-id", "w", "--number", "line", input='{"user": "a", "n": 1}\n{"user": "b", "n": 2}\n')
    run("split", "app/rows", "1")
    [found] = objects(run("describe", "app/rows", "--json"))
    assert found["schema"] == [
        {"name": "user", "type": "string", "nullable": False},
        {"name": "n", "type": "int64", "nullable": True},
    ]
    assert found["writers"] == [{"id": "w", "last_number": 2}]
    assert [(part["number"], part["open"], part["start"], part["end"]) for part in found["all_segments"]] == [
        (0, True, 0.0, 0.5),
        (1, False, 0.5, 1.0),
        (2, True, 0.5, 0.75),
        (3, True, 0.75, 1.0),
    ]
    assert hw.Cut.parse(found["head"]) != hw.Cut.parse(found["tail"])
    shown = run("describe", "app/rows").stdout
    assert "user: string not null" in shown
    assert "████████████████················" in shown
    assert "last number" in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a:int64,b:string!", ["a: int64", "b: string not null"]),
        ("t:timestamp,u:timestamp[ms],d:decimal(10,2)", ["t: timestamp[us, tz=UTC]", "u: timestamp[ms]", "d: decimal128(10, 2)"]),
        ("l:list[int64],s:struct[x:int32,y:list[string]]", ["l: list<item: int64>", "s: struct<x: int32, y: list<item: string>>"]),
        ("m:map[string,double],b:bool,z:date32", ["m: map<string, double>", "b: bool", "z: date32[day]"]),
    ],
)
def test_a_schema_is_given_in_one_line(run: Run, text: str, shown: list[str]) -> None:
    run("create", "a/b", "--schema", text)
    output = run("describe", "a/b").stdout
    for field in shown:
        assert field in output


@pytest.mark.parametrize(
    "content", ['{"a": "int64!", "b": "string"}', '[{"name": "a", "type": "int64", "nullable": false}, {"name": "b", "type": "string"}]']
)
def test_a_schema_is_given_as_a_file(run: Run, tmp_path: Path, content: str) -> None:
    path = tmp_path / "schema.json"
    path.write_text(content)
    run("create", "a/b", "--schema", str(path))
    [found] = objects(run("describe", "a/b", "--json"))
    assert [(field["name"], field["type"], field["nullable"]) for field in found["schema"]] == [
        ("a", "int64", False),
        ("b", "string", True),
    ]


@pytest.mark.parametrize("text", ["a", "a:whole", "a:list[", "a:decimal(1)", "missing.json", ":", "a:struct[b]"])
def test_a_schema_that_makes_no_sense_is_a_usage_error(run: Run, text: str) -> None:
    assert "--schema" in run("create", "a/b", "--schema", text, code=2).stderr


def test_a_stream_made_twice_is_an_error_unless_that_is_fine(run: Run) -> None:
    run("create", "a/b")
    assert run("create", "a/b", code=1).stderr == "headwater: stream a/b exists\n"
    run("create", "a/b", "--exist-ok")
    assert "not of bytes" in run("create", "a/b", "--exist-ok", "--kind", "bytes", code=1).stderr


def test_events_are_read_as_values_json_or_a_table(run: Run) -> None:
    run("create", "a/b")
    run("write", "a/b", "--key", "user", input='{"user": "ann"}\n{"user": 7}\n{"user": null}\n')
    assert run("read", "a/b").stdout == '{"user": "ann"}\n{"user": 7}\n{"user": null}\n'
    rows = objects(run("read", "a/b", "--json"))
    assert [(row["segment"], row["number"], row["key"], row["value"]) for row in rows] == [
        (0, 0, "ann", '{"user": "ann"}'),
        (0, 1, "7", '{"user": 7}'),
        (0, 2, None, '{"user": null}'),
    ]
    assert all(datetime.fromisoformat(row["time"]).tzinfo is not None for row in rows)
    assert "ann" in run("read", "a/b", "--format", "table").stdout
    assert run("read", "a/b", "--limit", "1").stdout == '{"user": "ann"}\n'


def test_bytes_that_are_no_text_are_base64_in_json(run: Run) -> None:
    run("create", "a/b")
    run("write", "a/b", input=b"\xff\xfe\n")
    [row] = objects(run("read", "a/b", "--json"))
    assert row["value_base64"] == "//4=" and "value" not in row
    assert run("read", "a/b").stdout_bytes == b"\xff\xfe\n"


def test_rows_of_every_type_are_read_as_json(run: Run) -> None:
    run("create", "a/b", "--schema", "t:timestamp,d:decimal(10,2),b:binary,l:list[int64],f:double,s:struct[x:int64],z:date32,h:time64[us]")
    line = '{"t": "2031-05-01T00:00:00Z", "d": "1.50", "b": "x", "l": [1, 2], "f": 0.5, "s": {"x": 1}, "z": "2031-05-01", "h": "12:30:00"}'
    run("write", "a/b", input=line + "\n")
    [row] = objects(run("read", "a/b"))
    assert row == {
        "t": "2031-05-01T00:00:00Z",
        "d": "1.50",
        "b": "x",
        "l": [1, 2],
        "f": 0.5,
        "s": {"x": 1},
        "z": "2031-05-01",
        "h": "12:30:00",
    }
    run("write", "a/b", input=json.dumps(row) + "\n")
    assert objects(run("read", "a/b")) == [row, row]


def test_reading_begins_and_ends_at_cuts_and_times(run: Run, url: str) -> None:
    run("create", "a/b")
    run("write", "a/b", input="one\n")
    cut = objects(run("describe", "a/b", "--json"))[0]["tail"]
    between = datetime.now(UTC)
    run("write", "a/b", input="two\n")
    assert run("read", "a/b", "--start", cut).stdout == "two\n"
    assert run("read", "a/b", "--end", cut).stdout == "one\n"
    assert run("read", "a/b", "--start", "tail").stdout == ""
    assert run("read", "a/b", "--start", "head", "--end", "tail").stdout == "one\ntwo\n"
    # The catalog's clock is this host's.
    assert run("read", "a/b", "--start", between.isoformat()).stdout == "two\n"
    assert run("read", "a/b", "--end", between.replace(tzinfo=None).isoformat()).stdout == "one\n"


def test_tail_gives_the_last_events_over_all_segments(run: Run) -> None:
    run("create", "a/b", "--segments", "3")
    for number in range(12):
        run("write", "a/b", "--key-regex", r"\d+", input=f"event {number}\n")
    run("split", "a/b", "0")
    assert run("tail", "a/b", "-n", "3").stdout == "event 9\nevent 10\nevent 11\n"
    assert len(run("tail", "a/b").stdout.splitlines()) == 10
    assert run("tail", "a/b", "-n", "0").stdout == ""
    assert objects(run("tail", "a/b", "-n", "1", "--json"))[0]["value"] == "event 11"
    assert "event 11" in run("tail", "a/b", "-n", "1", "--format", "table").stdout
    assert len(run("tail", "a/b", "-n", "99").stdout.splitlines()) == 12


def test_keeps_and_roll_backs(run: Run, url: str) -> None:
    run("create", "a/b")
    run("write", "a/b", input="one\ntwo\n")
    cut = objects(run("describe", "a/b", "--json"))[0]["tail"]
    assert objects(run("keep", "job", "a/b", "--json")) == [{"keep": "job", "cut": cut}]
    run("write", "a/b", input="three\n")
    assert "keep 'job'" in run("truncate", "a/b", "--at", "tail", "--yes", code=1).stderr
    assert objects(run("kept", "--json")) == [{"keep": "job", "cut": cut}] and "job" in run("kept").stdout
    run("roll-back", "a/b", "--force", code=2)
    assert "by 1 events" in run("roll-back", "a/b", "--to", cut, "--keep-as", "a/old", "--force").stdout
    assert run("read", "a/b").stdout == "one\ntwo\n" and run("read", "a/old").stdout == "one\ntwo\nthree\n"
    assert "nothing is kept" in (run("unkeep", "job") and run("kept")).stderr
    with hw.open(url) as store:
        table = store.table("a/t")
        table.put("k", b"1")
        table.put("k", b"2")
    run("roll-back", "a/t", "--to", "head", "--force", code=2)
    assert objects(run("roll-back", "a/t", "--version", "1", "--force", "--json")) == [{"name": "a/t", "version": 1}]
    with hw.open(url) as store:
        assert store.table("a/t").get("k") == (b"1", 3)


def test_a_claim_is_shown_and_ended_by_hand(run: Run, url: str) -> None:
    with hw.open(url) as store:
        stream = store.create_stream("a/b")
        stream.claim("job-1", ("a/lease", "owner", store.table("a/lease").put("owner", b"")))
    assert "job-1" in run("describe", "a/b").stdout
    assert objects(run("describe", "a/b", "--json"))[0]["claimed_by"] == "job-1"
    assert "claimed by 'job-1'" in run("write", "a/b", input="one\n", code=1).stderr
    assert objects(run("release-claim", "a/b", "--force", "--json")) == [{"name": "a/b", "released": "job-1"}]
    assert "nobody claims a/b" in run("release-claim", "a/b").stdout
    assert objects(run("describe", "a/b", "--json"))[0]["claimed_by"] is None
    run("write", "a/b", input="one\n")


def test_following_ends_with_a_sealed_stream(run: Run) -> None:
    run("create", "a/b")
    run("write", "a/b", input="one\ntwo\n")
    run("seal", "a/b")
    assert run("tail", "a/b", "--follow").stdout == "one\ntwo\n"


def test_a_byte_stream_comes_out_as_it_went_in(run: Run) -> None:
    run("create", "a/raw", "--kind", "bytes")
    run("write", "a/raw", input=b"one\ntwo\xff")
    run("write", "a/raw", input=b"three\n")
    assert run("read", "a/raw").stdout_bytes == b"one\ntwo\xffthree\n"
    assert run("read", "a/raw", "--limit", "3").stdout_bytes == b"one"
    assert run("tail", "a/raw", "-n", "1").stdout_bytes == b"two\xffthree\n"
    cut = objects(run("describe", "a/raw", "--json"))[0]["tail"]
    run("write", "a/raw", input=b"four")
    assert run("read", "a/raw", "--start", cut).stdout_bytes == b"four"
    run("seal", "a/raw")
    assert run("tail", "a/raw", "-f", "-n", "1").stdout_bytes == b"four"
    run("write", "a/raw", "--key", "x", input=b"", code=2)
    assert "no events" in run("read", "a/raw", "--format", "table", code=2).stderr


def test_a_byte_stream_is_read_as_json_in_pieces_with_their_offsets(run: Run) -> None:
    run("create", "a/raw", "--kind", "bytes")
    assert run("read", "a/raw", "--json").stdout == "" and run("tail", "a/raw", "--json").stdout == ""
    run("write", "a/raw", input=b"one\ntwo\n")
    run("write", "a/raw", input=b"three\n\xff")
    last = {"offset": 8, "data_base64": base64.b64encode(b"three\n\xff").decode()}
    assert objects(run("read", "a/raw", "--json")) == [{"offset": 0, "data": "one\ntwo\n"}, last]
    assert objects(run("read", "a/raw", "--format", "json", "--limit", "3")) == [{"offset": 0, "data": "one"}]
    assert objects(run("tail", "a/raw", "--json", "-n", "2")) == [last]
    run("seal", "a/raw")
    assert objects(run("tail", "a/raw", "--format", "json", "-n", "2", "--follow")) == [last]


def test_segments_are_split_and_merged(run: Run) -> None:
    run("create", "a/b")
    [made] = objects(run("split", "a/b", "0", "--parts", "4", "--json"))
    assert made["epoch"] == 1 and [part["number"] for part in made["segments"]] == [1, 2, 3, 4]
    [made] = objects(run("merge", "a/b", "2", "3", "--json"))
    assert made["segments"] == [{"number": 5, "start": 0.25, "end": 0.75}]
    assert "epoch 3" in run("merge", "a/b", "1", "5").stdout
    assert "not neighbours" not in run("describe", "a/b").stdout
    assert "has no open segment 0" in run("split", "a/b", "0", code=1).stderr


def test_truncating_deletes_what_lies_before_a_place(run: Run) -> None:
    run("create", "a/b")
    run("write", "a/b", input="one\ntwo\n")
    cut = objects(run("describe", "a/b", "--json"))[0]["tail"]
    run("write", "a/b", input="three\n")
    assert "2 events of a/b deleted, 1 event left" in run("truncate", "a/b", "--at", cut).stdout
    assert run("read", "a/b").stdout == "three\n"
    assert objects(run("truncate", "a/b", "--at", "tail", "--yes", "--json"))[0]["events"] == 0


def test_a_stream_is_sealed_before_it_is_deleted(run: Run) -> None:
    run("create", "a/b")
    run("create", "a/c")
    assert "seal it before" in run("delete", "a/b", "--yes", code=1).stderr
    run("seal", "a/b")
    assert "is sealed" in run("write", "a/b", input="x\n", code=1).stderr
    run("delete", "a/b", "--yes")
    assert objects(run("delete", "a/c", "--seal", "--yes", "--json")) == [{"name": "a/c", "deleted": True}]
    assert run("list").stdout == ""


def test_a_stream_whose_deletion_is_refused_is_not_sealed(run: Run, url: str) -> None:
    run("create", "a/b")
    run("write", "a/b", input="one\n")
    with hw.open(url) as store:
        store.tag("keep", store.cut("a/b"))
    assert "kept by the tags keep" in run("delete", "a/b", "--seal", "--yes", code=1).stderr
    run("write", "a/b", input="two\n")
    assert run("read", "a/b").stdout == "one\ntwo\n"


def test_a_stream_is_made_with_a_retention(run: Run, url: str) -> None:
    run("create", "a/days", "--keep-days", "7")
    run("create", "a/bytes", "--keep-bytes", "1000")
    run("create", "a/read", "--keep-until-read", "g", "--keep-until-read", "h", "--keep-days", "1")
    run("create", "a/both", "--keep-days", "7", "--keep-bytes", "1000", code=2)
    with hw.open(url, upkeep=False) as store:
        assert store.stream("a/days").retention == hw.Retention.by_time(timedelta(days=7))
        assert store.stream("a/bytes").retention == hw.Retention.by_size(1000)
        assert store.stream("a/read").retention == hw.Retention.by_consumption(["g", "h"], max_age=timedelta(days=1))


@pytest.mark.slow
def test_bench_measures_a_store_and_leaves_nothing_in_it(run: Run) -> None:
    figures = {figure["what"]: figure["value"] for figure in objects(run("bench", "--seconds", "0.1", "--json"))}
    assert len(figures) == 8 and all(value > 0 for value in figures.values())
    assert "transactions of one event" in run("bench", "--seconds", "0.1").stdout
    assert objects(run("list", "--json")) == []


def test_upkeep_runs_once(run: Run) -> None:
    run("create", "a/b")
    assert objects(run("upkeep", "--once", "--json"))[0].keys() >= {"sessions_fenced", "rows_deleted"}
    assert "nothing to do" in run("upkeep", "--once").stdout


def test_a_sound_store_is_found_sound(run: Run) -> None:
    run("create", "a/b")
    run("write", "a/b", input="one\n")
    assert run("check").stdout.startswith("all is well: 1 streams, 1 segments, 1 blocks, 1 events")
    [report] = objects(run("check", "--json"))
    assert report["ok"] and report["events"] == 1 and report["problems"] == []


def test_damage_is_named_and_ends_with_1(run: Run, url: str) -> None:
    run("create", "a/b")
    run("write", "a/b", input="one\n")
    with hw.open(url) as store:
        store._engine.database.write(lambda tx: tx.run("DELETE FROM extent"))
    assert "gap: a/b segment 0: no block holds events 0-0" in run("check", code=1).stdout
    [report] = objects(run("check", "--json", code=1))
    assert not report["ok"] and {problem["kind"] for problem in report["problems"]} == {"gap", "dangling"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["read", "a/none"], 1, "there is no stream a/none"),
        (["read", "none"], 1, "can't name a stream"),
        (["split", "a/b", "9"], 1, "has no open segment 9"),
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["read"], 2, "Missing argument 'NAME'"),
        (["read", "a/b", "--start", "yesterday"], 2, "'yesterday' is neither head, tail"),
        (["read", "a/b", "--start", "{}"], 2, "is neither head, tail"),
        (["read", "a/b", "--limit", "-1"], 2, "--limit"),
        (["create", "a/c", "--segments", "0"], 2, "--segments"),
        (["write", "a/b", "--number", "line"], 2, "--number is for a named writer"),
        (["write", "a/b", "--key", "x", "--key-regex", "x"], 2, "not from both"),
        (["write", "a/b", "--key-regex", "("], 2, "no regular expression"),
        (["write", "a/b", "--file", "/no/such/file"], 2, "--file"),
        (["read", "a/b", "--storage-option", "x"], 2, "NAME=VALUE"),
    ],
)
def test_errors_are_one_line_and_a_code(run: Run, arguments: list[str], code: int, said: str) -> None:
    run("create", "a/b")
    error = run(*arguments, code=code).stderr
    assert error.startswith("headwater: ") and error.count("\n") == 1 and said in error
    as_json = json.loads(run(*arguments, "--json", code=code).stderr)
    assert as_json.keys() == {"error", "message"} and said in as_json["message"]


def test_without_a_store_it_says_how_to_give_one() -> None:
    result = CliRunner(env={"HEADWATER_STORE": None}).invoke(main, ["list"])
    assert result.exit_code == 2 and "--store" in result.stderr and "HEADWATER_STORE" in result.stderr


def test_a_store_that_is_not_there_is_not_made_by_looking(run: Run, tmp_path: Path) -> None:
    for command in (["list"], ["describe"], ["check"], ["read", "a/b"], ["write", "a/b"], ["upkeep", "--once"], ["delete", "a/b", "--yes"]):
        assert "there is no headwater store" in run(*command, "--store", str(tmp_path / "none"), code=1).stderr
    assert not (tmp_path / "none").exists()


def test_a_file_is_no_store(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert run("create", "a/b", "--store", str(tmp_path / "file"), code=1).stderr.count("\n") == 1


def test_the_option_wins_over_the_environment(run: Run, tmp_path: Path) -> None:
    run("create", "a/b")
    run("create", "c/d", "--store", str(tmp_path / "other"))
    assert [row["name"] for row in objects(run("list", "--json"))] == ["a/b"]
    assert [row["name"] for row in objects(run("list", "--json", "-s", str(tmp_path / "other")))] == ["c/d"]


def test_a_catalog_on_postgresql_is_given_by_option(run: Run, postgres_url: str) -> None:
    run("create", "a/b", "--catalog", postgres_url)
    run("write", "a/b", "--catalog", postgres_url, input="one\n")
    assert run("read", "a/b", "--catalog", postgres_url).stdout == "one\n"
    [store] = objects(run("describe", "--json", "--catalog", postgres_url))
    assert store["catalog"] == "postgresql" and store["catalog_bytes"] > 0
    assert objects(run("check", "--json", "--catalog", postgres_url))[0]["ok"]


def test_tail_shows_times_as_read_does(run: Run, url: str) -> None:
    kinds = (pa.timestamp("ns", "UTC"), pa.timestamp("ns"), pa.duration("ns"), pa.list_(pa.timestamp("ns")))
    columns = {kind: pa.array([1_700_000_000_123_456_789]).cast(kind) for kind in kinds[:3]}
    columns[kinds[3]] = pa.array([[1_700_000_000_123_456_789]], pa.list_(pa.int64())).cast(kinds[3])
    with hw.open(url) as store:
        for number, kind in enumerate(kinds):
            stream = store.create_stream(f"a/s{number}", schema=pa.schema([("at", kind)]))
            with stream.writer() as writer:
                writer.write_batch(pa.record_batch({"at": columns[kind]}))
    for number in range(len(kinds)):
        assert run("tail", f"a/s{number}").stdout == run("read", f"a/s{number}").stdout
    assert "2023-11-14T22:13:20.123456Z" in run("tail", "a/s0").stdout


NUMBERS = [
    ("scaling", "a/b", "--hours"),
    ("create", "a/c", "--keep-days"),
    ("upkeep", "--every"),
    ("bench", "--seconds"),
    ("demo", "--rate"),
]
NUMBERS += [("ingest", "x.csv", "--stream", "a/b", option) for option in ("--settle", "--lease")]


@pytest.mark.parametrize("arguments", NUMBERS, ids=lambda arguments: f"{arguments[0]} {arguments[-1]}")
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e300", "-1"])
def test_numbers_that_are_none_or_beyond_all_use_are_refused(run: Run, arguments: tuple[str, ...], number: str) -> None:
    run("create", "a/b")
    assert "Invalid value for" in run(*arguments, number, code=2).stderr


def test_a_stream_may_be_kept_for_longer_than_anybody_will_look(run: Run) -> None:
    run("create", "a/b", "--keep-days", "1e8")
    assert "problem" not in run("upkeep", "--once").output


def test_a_limit_is_what_can_be_counted(run: Run) -> None:
    run("create", "a/b")
    assert "Invalid value for" in run("read", "a/b", "--limit", "9" * 20, code=2).stderr
    run("read", "a/b", "--limit", str(2**63 - 1))


@pytest.mark.parametrize(
    "text",
    ['[{"name": 1, "type": 2}]', '[{"name": "a", "type": 2}]', "[" * 100_000, '{"a": "' + "list[" * 5000 + "int64" + "]" * 5000 + '"}'],
    ids=["numbers", "a type that is a number", "deep", "a deep type"],
)
def test_a_schema_in_a_file_that_is_none_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "schema.json").write_text(text)
    assert "--schema" in run("create", "a/b", "--schema", str(tmp_path / "schema.json"), code=2).stderr


@pytest.mark.parametrize("text", ["n:decimal(99999999999999999999,2)", "n:" + "list[" * 5000 + "int64" + "]" * 5000])
def test_types_beyond_all_use_are_refused(run: Run, text: str) -> None:
    assert "--schema" in run("create", "a/b", "--schema", text, code=2).stderr


def test_a_schema_may_be_longer_than_the_name_of_a_file(run: Run) -> None:
    run("create", "a/b", "--schema", ",".join(f"column{number}:int64" for number in range(100)))


def test_bytes_that_are_no_text_are_refused_or_taken_as_they_are(run: Run) -> None:
    run("create", "a/b")
    assert "--schema" in run("create", "a/c", "--schema", "\udcff:int64", code=2).stderr
    assert "can't name a label" in run("list", "--label", "\udcff", code=1).stderr
    assert "can't name a scope" in run("list", "--scope", "\udcff", code=1).stderr
    run("create", "a/rows", "--schema", "n:int64")
    assert "has no column" in run("write", "a/rows", "--key", "\udcff", input="{}", code=1).stderr
    assert "no column is called" in run("write", "a/rows", input='{"\\ud800": 1}', code=1).stderr
    run("write", "a/b", "--key-regex", "\udcff.", input=b"x\xffy\n")
    assert json.loads(run("read", "a/b", "--json").stdout)["key_base64"] == base64.b64encode(b"\xffy").decode()
    assert "finds no key" in run("write", "a/b", "--key-regex", "\udcff", input=b"x\n", code=1).stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_their_options(run: Run, shell: str) -> None:
    script = run("completion", shell).stdout
    assert "_HEADWATER_COMPLETE" in script
    cases = ("headwater tr", 1, ["truncate", "transactions"]), ("headwater read --st", 2, ["--start", "--store", "--storage-option"])
    for words, at, found in (*cases, ("headwater --ver", 1, ["--version"])):
        given = {"_HEADWATER_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        command = [sys.executable, "-c", "import headwater.cli; headwater.cli.main()"]
        done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=60)
        assert [line.removeprefix("plain,") for line in done.stdout.split()] == found, done.stderr


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").stdout == f"headwater {hw.__version__}\n"
