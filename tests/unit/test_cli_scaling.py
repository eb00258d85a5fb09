"""`headwater scaling`, and the heat map it draws."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import headwater as hw
from headwater.cli import main
from headwater.cli.heatmap import draw
from headwater.cli.scaling import show
from headwater.model.scaling_history import LoadSample, RangeRate, ScalingHistory, SegmentLife

Run = Callable[..., Result]
NOON = datetime(2031, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def run(url: str) -> Run:
    def run(*arguments: str, code: int = 0) -> Result:
        result = CliRunner(env={"HEADWATER_STORE": url, "HEADWATER_CATALOG": None}).invoke(main, arguments)
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


@pytest.fixture
def scaled(url: str) -> str:
    """A stream that was split by load."""
    with hw.open(url, upkeep=False) as store:
        stream = store.create_stream("taxi/rides", scaling=hw.Scaling.by_event_rate(1, max_segments=9))
        now = datetime.now(UTC)
        for minute in range(40):
            with stream.writer() as writer:
                for number in range(180):
                    writer.write(b"ride", key=number)
            store.scale_streams(now + minute * MINUTE)
        assert len(stream.segments()) > 2
    return stream.name


def test_the_history_of_a_stream_is_shown_as_a_heat_map(run: Run, scaled: str) -> None:
    lines = run("scaling", scaled, "--height", "8", "--events", "1").stdout.splitlines()
    assert lines[0].startswith("taxi/rides: 1 events/s per segment, at least 1 segment, at most 9; ")
    grid = [line.partition("│")[2] for line in lines if "│" in line]
    assert len(grid) == 8 and len({len(line) for line in grid}) == 1
    assert any("█" in line for line in grid), "hot at first"
    assert not any(line.endswith("█") for line in grid), "and split then"
    assert any("splits and 0 merges by load, the last 1:" in line for line in lines)
    assert "rate" in lines[-1] and "target 1/s" in lines[-1]


def test_the_history_is_there_for_machines(run: Run, scaled: str) -> None:
    answer = json.loads(run("scaling", scaled, "--json").stdout)
    assert answer["name"] == scaled and answer["scaling"]["kind"] == "event_rate"
    assert answer["epoch"] == len({event["epoch"] for event in answer["events"]})
    assert answer["segments_open"] == sum(segment["sealed"] is None for segment in answer["segments"])
    assert sum(segment["events"] for segment in answer["segments"]) == 40 * 180
    last = answer["samples"][-1]
    assert sum(rate["rate"] for rate in last["rates"]) == pytest.approx(3.0, rel=0.05)
    assert {"time", "kind", "target", "rates"} == last.keys() and datetime.fromisoformat(last["time"])
    recent = json.loads(run("scaling", scaled, "--json", "--hours", "0.1").stdout)
    assert 0 < len(recent["samples"]) < len(answer["samples"])


@pytest.mark.slow
def test_the_heat_map_can_be_a_picture(run: Run, scaled: str, tmp_path: Path) -> None:
    picture = tmp_path / "day.png"
    assert str(picture) in run("scaling", scaled, "--png", str(picture)).stdout
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "can't be written" in run("scaling", scaled, "--png", str(tmp_path / "none" / "day.png"), code=1).stderr


def test_without_matplotlib_the_error_is_one_line_that_says_what_to_install(url: str, scaled: str, tmp_path: Path) -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from headwater.cli import main; main()"
    command = [sys.executable, "-c", program, "scaling", scaled, "--store", url, "--png", str(tmp_path / "x.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "headwater: --png needs matplotlib: pip install 'headwater[plot]'\n"


def test_a_stream_scaled_by_hand_shows_mean_rates(run: Run) -> None:
    run("create", "app/log", "--segments", "2")
    run("split", "app/log", "0")
    shown = run("scaling", "app/log").stdout
    assert "app/log: scaled by hand; 3 segments open, epoch 1" in shown and "(the highest)" in shown
    assert "by load" not in shown
    assert run("scaling", "app/none", code=1).stderr == "headwater: there is no stream app/none\n"


def test_a_stream_that_scales_by_rate_is_made_from_the_command_line(run: Run, url: str) -> None:
    run("create", "app/a", "--events-per-second", "100", "--segments", "3", "--max-segments", "50", "--factor", "4")
    run("create", "app/b", "--bytes-per-second", "1000000")
    with hw.open(url, upkeep=False) as store:
        assert store.stream("app/a").scaling == hw.Scaling.by_event_rate(100, factor=4, min_segments=3, max_segments=50)
        assert store.stream("app/b").scaling == hw.Scaling.by_data_rate(1_000_000)
        assert len(store.stream("app/a").segments()) == 3
    assert "not by both" in run("create", "app/c", "--events-per-second", "1", "--bytes-per-second", "1", code=2).stderr
    assert "--events-per-second" in run("create", "app/c", "--max-segments", "5", code=2).stderr
    assert (
        "whole number of at least 3"
        in run("create", "app/c", "--bytes-per-second", "1", "--segments", "3", "--max-segments", "2", code=1).stderr
    )


# The heat map itself.


def life(start: float, end: float, made: datetime, sealed: datetime | None, events: int) -> SegmentLife:
    return SegmentLife(0, start, end, made, sealed, events, events * 10)


def test_a_cell_shows_the_rate_of_the_segment_that_was_there() -> None:
    whole, half = (LoadSample(NOON, "event_rate", 5, (RangeRate(0.0, 1.0, 4.0),)), (RangeRate(0.0, 0.5, 1.0), RangeRate(0.5, 1.0, 3.0)))
    history = ScalingHistory((), (whole, LoadSample(NOON + MINUTE, "event_rate", 5, half)), ())
    drawn = draw(history, width=2, height=4, now=NOON)
    assert (drawn.start, drawn.end, drawn.target, drawn.unit) == (NOON, NOON + 2 * MINUTE, 5, "events/s")
    assert drawn.columns == [[4.0] * 4, [1.0, 1.0, 3.0, 3.0]]
    assert drawn.segments == [1, 2]


def test_segments_narrower_than_a_cell_show_the_hottest() -> None:
    rates = tuple(RangeRate(index / 8, (index + 1) / 8, float(index)) for index in range(8))
    drawn = draw(ScalingHistory((), (LoadSample(NOON, "event_rate", 5, rates),), ()), width=1, height=2, now=NOON)
    assert drawn.columns == [[3.0, 7.0]] and drawn.highest == 7.0


def test_before_it_was_sampled_a_segment_shows_its_mean_and_after_it_silence() -> None:
    lives = (life(0.0, 1.0, NOON, NOON + 100 * MINUTE, 6000 * 2), life(0.0, 1.0, NOON + 100 * MINUTE, None, 0))
    sample = LoadSample(NOON + 100 * MINUTE, "event_rate", 5, (RangeRate(0.0, 1.0, 4.0),))
    drawn = draw(ScalingHistory(lives, (sample,), ()), width=4, height=1, now=NOON + 200 * MINUTE)
    assert [column[0] for column in drawn.columns] == [2.0, 2.0, 4.0, 0.0]


def test_bytes_are_told_as_bytes() -> None:
    sample = LoadSample(NOON, "data_rate", 5, (RangeRate(0.0, 1.0, 4.0),))
    assert draw(ScalingHistory((), (sample,), ()), width=1, height=1, now=NOON).unit == "bytes/s"


def test_a_stream_made_this_moment_has_a_map_too() -> None:
    drawn = draw(ScalingHistory((life(0.0, 1.0, NOON, None, 0),), (), ()), width=3, height=2, now=NOON)
    assert len(drawn.columns) == 3 and drawn.full > 0


def test_a_terminal_with_colours_gets_two_cells_a_character() -> None:
    rates = (RangeRate(0.0, 0.5, 9.0), RangeRate(0.5, 1.0, 0.0))
    drawn = draw(ScalingHistory((), (LoadSample(NOON, "event_rate", 5, rates),), ()), width=30, height=4, now=NOON)
    text = io.StringIO()
    show(Console(file=text, force_terminal=True, color_system="truecolor", width=80, soft_wrap=True, highlight=False), drawn, colours=True)
    lines = text.getvalue().splitlines()
    assert [line.count("▀") for line in lines[:2]] == [30, 30]
    assert "214;40;40" in lines[1] and "214;40;40" not in lines[0], "red below, where it is above the target"
