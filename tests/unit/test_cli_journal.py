"""`headwater journal`: what it answers to people and to machines, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import headwater as hw
from headwater.cli import main

Run = Callable[..., Result]

NAME = "shop/orders"
COMMAND = [sys.executable, "-c", "import headwater.cli; headwater.cli.main()"]
PATIENCE_SECONDS = 60.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with a journal of three orders."""
    url = str(tmp_path / "store")
    with hw.open(url, upkeep=False) as store:
        journal = store.journal(NAME, scaling=hw.Scaling.fixed(2))
        journal.persist("order-1", [hw.Record("placed", {"item": "tea"}, tags=["eu", "tea"]), hw.Record("paid", {"cents": 450})])
        journal.persist("order-2", hw.Record("placed", {"item": "mug"}, tags=["us"], version=2, meta={"by": "ann"}))
        journal.persist("order-1", hw.Record("shipped", None))
        journal.persist("other", hw.Record("placed", [1, "ü"], tags=["eu"]))
        journal.snapshot("order-1", 2, {"paid": True})
        journal.snapshot("order-1", 3, {"shipped": True}, version=2)
        store.create_stream("shop/raw")
    return url


@pytest.fixture
def run(url: str) -> Run:
    def run(*arguments: str, code: int = 0, input: str | None = None) -> Result:
        result = CliRunner(env={"HEADWATER_STORE": url, "HEADWATER_CATALOG": None}).invoke(main, ["journal", *arguments], input=input)
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def columns(result: Result) -> list[list[str]]:
    """The rows of a table, without its head, in words."""
    return [line.split() for line in result.stdout.splitlines()[2:] if line.strip()]


@pytest.mark.parametrize("name", ["ids", "events", "head", "snapshots", "delete"])
def test_every_command_takes_a_store_and_json(run: Run, name: str) -> None:
    text = run(name, "--help").stdout
    assert "--store" in text and "--catalog" in text and "--json" in text
    assert name in CliRunner().invoke(main, ["journal", "--help"]).stdout


def test_ids_are_listed_by_prefix_and_in_pages(run: Run) -> None:
    assert run("ids", NAME).stdout == "order-1\norder-2\nother\n"
    assert run("ids", NAME, "--prefix", "order").stdout == "order-1\norder-2\n"
    assert run("ids", NAME, "--after", "order-1", "--limit", "1").stdout == "order-2\n"
    assert run("ids", NAME, "--limit", "0").stdout == ""
    assert objects(run("ids", NAME, "--json")) == [{"id": "order-1"}, {"id": "order-2"}, {"id": "other"}]


def test_an_id_takes_one_line_whatever_is_in_it(run: Run, url: str) -> None:
    with hw.open(url) as store:
        store.journal(NAME).persist("a\nb\x1b", hw.Record("placed", 1))
    assert run("ids", NAME, "--prefix", "a").stdout == '"a\\nb\\u001b"\n'
    assert objects(run("ids", NAME, "--prefix", "a", "--json")) == [{"id": "a\nb\x1b"}]


def test_events_are_printed_for_machines_with_all_that_they_have(run: Run) -> None:
    [found] = objects(run("events", NAME, "--id", "order-2", "--json"))
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert len(found.pop("event_id")) == 36 and found.pop("segment") in (0, 1) and found.pop("number") >= 0
    assert found == {
        "id": "order-2",
        "sequence": 1,
        "type": "placed",
        "version": 2,
        "data": {"item": "mug"},
        "tags": ["us"],
        "meta": {"by": "ann"},
    }


def test_events_are_printed_for_people_as_a_table(run: Run) -> None:
    shown = run("events", NAME, "--id", "order-1")
    assert shown.stdout.splitlines()[0].split() == ["id", "sequence", "time", "type", "data", "tags"]
    rows = columns(shown)
    assert [row[:2] + row[3:] for row in rows] == [
        ["order-1", "1", "placed", '{"item":"tea"}', "eu", "tea"],
        ["order-1", "2", "paid", '{"cents":450}'],
        ["order-1", "3", "shipped", "null"],
    ]
    assert "placed v2" in run("events", NAME).stdout


def test_events_are_filtered_by_all_that_is_given(run: Run) -> None:
    def found(*arguments: str) -> list[tuple[str, int]]:
        return sorted((row["id"], row["sequence"]) for row in objects(run("events", NAME, *arguments, "--json")))

    assert found() == [("order-1", 1), ("order-1", 2), ("order-1", 3), ("order-2", 1), ("other", 1)]
    assert found("--tag", "eu") == [("order-1", 1), ("other", 1)]
    assert found("--tag", "eu", "--id", "other") == [("other", 1)]
    assert found("--type", "paid") == [("order-1", 2)]
    assert found("--tag", "us", "--type", "paid") == []
    assert len(found("--limit", "2")) == 2
    assert found("--start", "tail") == []


def test_events_begin_and_end_at_cuts(run: Run, url: str) -> None:
    with hw.open(url) as store:
        cut = str(store.cut(NAME))
        store.journal(NAME).persist("order-9", hw.Record("placed", 9))
    assert [row["id"] for row in objects(run("events", NAME, "--start", cut, "--json"))] == ["order-9"]
    assert len(objects(run("events", NAME, "--end", cut, "--json"))) == 5


def test_a_table_of_many_events_ends_and_says_so(run: Run, url: str) -> None:
    with hw.open(url) as store:
        journal = store.journal(NAME)
        for _ in range(11):
            journal.persist("many", [hw.Record("counted", None) for _ in range(1000)])
    shown = run("events", NAME, "--id", "many")
    assert len(columns(shown)) == 10_000 and "only the first 10,000" in shown.stderr
    assert "only the first" not in run("events", NAME, "--id", "many", "--limit", "10000").stderr
    assert len(objects(run("events", NAME, "--id", "many", "--json"))) == 11_000


def test_followers_end_with_a_sealed_journal_or_their_limit(run: Run, url: str) -> None:
    assert run("ids", NAME, "--follow", "--limit", "2").stdout == "order-1\norder-2\n"
    assert [row["sequence"] for row in objects(run("events", NAME, "--follow", "--id", "order-1", "--limit", "2", "--json"))] == [1, 2]
    with hw.open(url) as store:
        store.stream(NAME).seal()
    assert run("ids", NAME, "--follow", "--prefix", "oth").stdout == "other\n"
    [line] = run("events", NAME, "--follow", "--type", "paid").stdout.splitlines()
    assert line.split()[1:] == ["order-1", "2", "paid", '{"cents":450}']


def test_a_head_is_shown_also_of_an_unknown_id(run: Run) -> None:
    assert objects(run("head", NAME, "order-1", "--json")) == [{"id": "order-1", "sequence": 3, "low": 1, "snapshot": 3}]
    assert objects(run("head", NAME, "nobody", "--json")) == [{"id": "nobody", "sequence": 0, "low": 0, "snapshot": None}]
    assert columns(run("head", NAME, "order-1")) == [["order-1", "3", "1", "3"]]
    assert columns(run("head", NAME, "nobody")) == [["nobody", "0", "none", "none"]]


def test_snapshots_are_listed_the_newest_first(run: Run, url: str) -> None:
    newest, oldest = objects(run("snapshots", NAME, "order-1", "--json"))
    assert newest == {"id": "order-1", "sequence": 3, "version": 2, "state": {"shipped": True}}
    assert oldest == {"id": "order-1", "sequence": 2, "version": 1, "state": {"paid": True}}
    assert objects(run("snapshots", NAME, "order-1", "--json", "--limit", "1")) == [newest]
    assert columns(run("snapshots", NAME, "order-1"))[0] == ["3", "2", "16", "B", '{"shipped":true}']
    assert run("snapshots", NAME, "order-2").stderr == "no snapshots\n"
    with hw.open(url) as store:
        store.journal(NAME).snapshot("order-2", 1, "long " * 1000)
    assert columns(run("snapshots", NAME, "order-2"))[0][-1].endswith("…")


def test_a_script_deletes_only_with_yes(run: Run) -> None:
    assert "--yes" in run("delete", NAME, "order-1", code=2).stderr
    assert "--yes" in json.loads(run("delete", NAME, "order-1", "--json", code=2).stderr)["message"]
    assert objects(run("head", NAME, "order-1", "--json"))[0]["low"] == 1


def test_the_first_events_of_an_entity_are_deleted_and_then_all(run: Run) -> None:
    assert run("delete", NAME, "order-1", "--to", "2", "--yes").stdout == (
        "the events up to 2 of order-1 in shop/orders are deleted, 1 left\n"
    )
    assert [row["sequence"] for row in objects(run("events", NAME, "--id", "order-1", "--json"))] == [3]
    assert "no sequence 4" in run("delete", NAME, "order-1", "--to", "4", "--yes", code=1).stderr
    assert objects(run("delete", NAME, "order-1", "--yes", "--json")) == [{"name": NAME, "id": "order-1", "sequence": 3, "low": 4}]
    assert run("ids", NAME).stdout == "order-2\nother\n"
    assert columns(run("head", NAME, "order-1")) == [["order-1", "3", "none", "none"]]
    assert run("delete", NAME, "nobody", "--yes", code=1).stderr == "headwater: shop/orders has no entity nobody\n"


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"y\n", 0)])
def test_on_a_terminal_a_deletion_asks(run: Run, url: str, answer: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer)
        done = subprocess.run(
            [*COMMAND, "journal", "delete", NAME, "order-1", "-s", url], stdin=theirs, capture_output=True, timeout=PATIENCE_SECONDS
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == code and b"Delete all events of order-1 in shop/orders?" in done.stderr
    assert ("order-1" in run("ids", NAME).stdout) == (code == 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("ids", "shop/none"), 1, "no stream shop/none"),
        (("ids", "shop/raw"), 1, "shop/raw is of kind 'events', not 'journal'"),
        (("head", NAME, ""), 1, "an entity's id is text"),
        (("events", NAME, "--tag", "two words"), 1, "a tag is text"),
        (("events", NAME, "--start", "yesterday"), 2, "neither head, tail"),
        (("events", NAME, "--follow", "--end", "tail"), 2, "--follow never ends"),
        (("ids", NAME, "--limit", "-1"), 2, "--limit"),
        (("delete", NAME, "order-1", "--to", "0", "--yes"), 2, "--to"),
        (("head", NAME), 2, "ID"),
        (("shuffle", NAME), 2, "shuffle"),
    ],
)
def test_what_can_not_be_done_is_one_line(run: Run, url: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    error = run(*arguments, code=code).stderr
    assert message in error and error.count("\n") == 1
    if arguments[0] != "shuffle":
        assert message in json.loads(run(*arguments, "--json", code=code).stderr)["message"]
    with hw.open(url) as store:
        assert store.journals() == [NAME], "no journal is created by a look"


def test_a_journal_is_listed_and_described_as_what_it_is(url: str) -> None:
    def run(*arguments: str) -> Result:
        result = CliRunner(env={"HEADWATER_STORE": url, "HEADWATER_CATALOG": None}).invoke(main, arguments)
        assert result.exit_code == 0, result.output
        return result

    rows = {row["name"]: row for row in objects(run("list", "--json"))}
    assert (rows[NAME]["kind"], rows[NAME]["events"], rows[NAME]["entities"]) == ("journal", 5, 3)
    assert "entities" not in rows["shop/raw"]
    listed = {row[0]: row for row in columns(run("list"))}
    assert listed[NAME][:4] == [NAME, "journal", "3", "5"] and listed["shop/raw"][:3] == ["shop/raw", "events", "0"]
    [found] = objects(run("describe", NAME, "--json"))
    assert (found["kind"], found["entities"], found["index"], found["events"]) == ("journal", 3, "ready", 5)
    [store] = objects(run("describe", "--json"))
    assert store["events"] == 5
    shown = {row[0]: row[1:] for row in columns(run("describe", NAME)) if len(row) > 1}
    assert (shown["entities"], shown["index"], shown["events"]) == (["3"], ["complete"], ["5"])
    with hw.open(url) as opened:
        opened.journal(NAME).delete("other")
    assert objects(run("describe", NAME, "--json"))[0]["entities"] == 2


def test_the_commands_for_streams_read_a_journal_and_refuse_to_write_it(url: str) -> None:
    runner = CliRunner(env={"HEADWATER_STORE": url, "HEADWATER_CATALOG": None})
    for command in ("read", "tail"):
        result = runner.invoke(main, [command, NAME, "--json"])
        assert result.exit_code == 0, result.output
        assert sorted((row["key"], row["value"]["type"], row["value"]["data"]) for row in objects(result)) == [
            ("order-1", "paid", '{"cents":450}'),
            ("order-1", "placed", '{"item":"tea"}'),
            ("order-1", "shipped", "null"),
            ("order-2", "placed", '{"item":"mug"}'),
            ("other", "placed", '[1,"ü"]'),
        ]
    assert runner.invoke(main, ["split", NAME, "0"]).exit_code == 0
    assert runner.invoke(main, ["scaling", NAME]).exit_code == 0
    result = runner.invoke(main, ["write", NAME], input='{"id": "x"}\n')
    assert result.exit_code == 1 and result.stderr == "headwater: shop/orders is a journal: use store.journal('shop/orders')\n"
    assert runner.invoke(main, ["delete", NAME, "--seal", "--yes"]).exit_code == 0


def test_a_journal_is_truncated_only_by_force(url: str) -> None:
    runner = CliRunner(env={"HEADWATER_STORE": url, "HEADWATER_CATALOG": None})
    refused = runner.invoke(main, ["truncate", NAME, "--at", "tail", "--yes"])
    assert refused.exit_code == 1 and "force" in refused.stderr and refused.stderr.count("\n") == 1
    assert "5 events of shop/orders deleted, 0 events left" in runner.invoke(main, ["truncate", NAME, "--at", "tail", "--force"]).stdout
    described = json.loads(runner.invoke(main, ["describe", NAME, "--json"]).stdout)
    assert described["events"] == 0 and described["index"] in ("building", "ready")
    assert runner.invoke(main, ["upkeep", "--once"]).exit_code == 0
    described = json.loads(runner.invoke(main, ["describe", NAME, "--json"]).stdout)
    assert described["index"] == "ready"


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    # Unbuffered, Python takes a write that ended early for a whole one, and doesn't see that the pipe was closed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [*COMMAND, "journal", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        # Who waits for a line that never comes is told by the end of the pipe.
        watch = threading.Timer(PATIENCE_SECONDS, process.kill)
        watch.start()
        try:
            yield process
        finally:
            watch.cancel()
            process.kill()


@pytest.mark.slow
def test_followers_print_what_comes_at_once_and_end_well_with_ctrl_c(url: str) -> None:
    with hw.open(url) as store, started("ids", NAME, "-f", "-s", url) as ids, started("events", NAME, "-f", "--json", "-s", url) as events:
        assert ids.stdout is not None and ids.stderr is not None and events.stdout is not None and events.stderr is not None
        assert [ids.stdout.readline() for _ in range(3)] == [b"order-1\n", b"order-2\n", b"other\n"]
        assert len([events.stdout.readline() for _ in range(5)]) == 5
        journal = store.journal(NAME)
        for number in range(3):
            journal.persist(f"new-{number}", [hw.Record("placed", number), hw.Record("paid", number)])
            assert ids.stdout.readline() == b"new-%d\n" % number
            both = [json.loads(events.stdout.readline()) for _ in range(2)]
            assert [(row["id"], row["sequence"], row["data"]) for row in both] == [
                (f"new-{number}", 1, number),
                (f"new-{number}", 2, number),
            ]
        for process in (ids, events):
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 0
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.read() == b"" and process.stderr.read() == b""


@pytest.mark.slow
def test_a_reader_that_stops_reading_ends_the_command_without_a_word(url: str) -> None:
    with hw.open(url) as store:
        journal = store.journal(NAME)
        for _ in range(10):
            journal.persist("many", [hw.Record("counted", "long enough to fill any pipe") for _ in range(1000)])
    for extra in ([], ["--json"], ["--json", "--follow"]):
        with started("events", NAME, "-s", url, *extra) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            assert process.wait(PATIENCE_SECONDS) == 0
            assert process.stderr.read() == b""
