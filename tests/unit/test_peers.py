"""The benchmark beside other systems: its arithmetic, its table, and headwater's own adapter. No server is started here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.peers import fetch
from benchmarks.peers.__main__ import ORDER, PEERS, run
from benchmarks.peers.figures import GOALS, Figure, goal_for, make_lines, make_markdown
from benchmarks.peers.files import FilesPeer
from benchmarks.peers.peer import LOST_SECONDS, due
from benchmarks.peers.servers import started_server
from benchmarks.peers.work import TINY, Supply, make_ticks


def test_a_ratio_above_one_always_means_that_headwater_is_better() -> None:
    figures = [
        Figure("write-events", "100 B", "headwater", 300.0, "events/s"),
        Figure("write-events", "100 B", "Kafka", 100.0, "events/s"),
        Figure("latency", "1 k/s, p50", "headwater", 2.0, "ms", less_is_better=True),
        Figure("latency", "1 k/s, p50", "Kafka", 3.0, "ms", less_is_better=True),
    ]
    lines = make_lines(figures, ORDER)
    assert [line.ratio for line in lines] == [3.0, 1.5]
    assert [line.reached for line in lines] == [True, True]


def test_headwater_before_and_after_the_peers_counts_as_the_mean_of_both() -> None:
    figures = [
        Figure("write-events", "100 B", "headwater", 400.0, "events/s"),
        Figure("write-events", "100 B", "Kafka", 100.0, "events/s"),
        Figure("write-events", "100 B", "headwater", 100.0, "events/s"),
    ]
    (line,) = make_lines(figures, ORDER)
    assert line.ratio == 2.5 and line.reached is False


def test_a_peer_that_promises_less_or_fell_behind_is_shown_so() -> None:
    figures = [
        Figure("latency", "10 k/s, p99", "headwater", 2.0, "ms", less_is_better=True),
        Figure("latency", "10 k/s, p99", "Redis", 9.0, "ms", less_is_better=True, note="only 3 k/s"),
    ]
    assert "| Redis (only 3 k/s) | 9 | 4.5x |" in make_markdown(make_lines(figures, ORDER))
    promises = {name: peer.promise for name, (peer, _) in PEERS.items()}
    assert "no fsync" in promises["kafka"] and "fsync before each ack" in promises["kafka-synced"] and "in memory" in promises["pravega"]


def test_what_only_headwater_or_only_a_peer_did_makes_no_line() -> None:
    figures = [Figure("latency", "a", "headwater", 2.0, "ms"), Figure("latency", "b", "Kafka", 2.0, "ms")]
    assert make_lines(figures, ORDER) == []


def test_the_far_tail_is_shown_without_a_goal() -> None:
    assert goal_for(Figure("latency", "1 k/s, p99.9", "Kafka", 1.0, "ms")) is None
    assert goal_for(Figure("latency", "1 k/s, p99", "Kafka", 1.0, "ms")) == GOALS["latency", "Kafka"]


def test_ticks_carry_the_time_at_which_they_are_due_and_add_up_to_the_rate() -> None:
    sent: list[int] = []
    ticks = list(make_ticks(10_000, 0.5, 100.0, sent))
    assert sum(sent) == sum(len(events) for _, events in ticks) == 5000
    assert ticks[0][0] == 100.0 and math.isclose(ticks[-1][0], 100.5, abs_tol=0.0011)
    assert int.from_bytes(ticks[1][1][0][0][:8], "big") == int(ticks[1][0] * 1e9)
    assert all(len(value) == 100 for _, events in ticks[:3] for value, _ in events)


def test_a_writer_that_is_hopelessly_late_gives_up() -> None:
    late = [(-LOST_SECONDS, [(b"v", b"k")])] * 3
    assert list(due(late)) == []


def test_a_supply_counts_what_it_handed_out() -> None:
    supply = Supply([(b"v", b"k")] * 1000)
    assert list(supply.until(0.0)) == [] and supply.count == 0
    taken = list(islice(supply.until(math.inf), 2500))
    # It goes on from the beginning, and counts in pieces.
    assert len(taken) == 2500 <= supply.count < 2500 + 128


@pytest.mark.slow
def test_headwater_does_every_job_and_leaves_nothing_running(tmp_path: Path) -> None:
    found = run(TINY, tmp_path, ("write", "bulk", "read", "latency", "transactions"), ("headwater",), lambda text: None)
    jobs = {figure.job for figure in found}
    assert jobs == {"start-up", "write-events", "write-bulk", "read-events", "read-batches", "latency", "transactions", "cost"}
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in found)


def test_parquet_is_written_and_read_back_in_bulk(tmp_path: Path) -> None:
    with FilesPeer("Parquet").running(tmp_path / "files") as running:
        running.client.create("t")
        producer = running.client.producer("t")
        producer.write_prepared(producer.prepare([(b"value", b"key")] * 10), 3)
        producer.write_prepared(producer.prepare([(b"value", b"key")] * 10), 1)
        assert running.client.read_batches("t", 40) == 40


def test_a_server_is_stopped_and_its_folder_gone_also_after_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    command = [sys.executable, "-c", "import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)"]
    pids = []
    with pytest.raises(ZeroDivisionError), started_server(command, folder, (folder / "up").exists) as pid:
        pids.append(pid)
        raise ZeroDivisionError
    assert not Path(f"/proc/{pids[0]}").exists() and not folder.exists()


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such disk')"]
    with pytest.raises(RuntimeError, match="ended with 1:\nno such disk"), started_server(command, tmp_path / "server", lambda: False):
        pass


def test_other_bytes_than_the_pinned_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cache" / fetch.KAFKA.name).mkdir(parents=True)
    (tmp_path / "cache" / fetch.KAFKA.name / "kafka.jar").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="holds other files"):
        fetch.fetch_jars(fetch.KAFKA, tmp_path / "cache")


def test_ivy_is_told_exactly_what_is_wanted() -> None:
    told = fetch.ivy_module(fetch.SPARK_KAFKA)
    assert told.count("<dependency ") == len(fetch.SPARK_KAFKA.wanted) and 'transitive="false"' in told


def test_the_help_needs_none_of_the_peers_clients() -> None:
    code = (
        "import sys, json, benchmarks.peers.__main__; "
        "print(json.dumps([name for name in ('confluent_kafka', 'redis', 'nats', 'pravega_client', 'deltalake', 'pyspark', 'matplotlib') "
        "if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert json.loads(done.stdout) == []
