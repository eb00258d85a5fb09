"""The command that shows how a stream's segments followed its load: scaling."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

import headwater as hw
from headwater.cli.app import Target, with_store
from headwater.cli.arguments import Number
from headwater.cli.heatmap import HeatMap, draw
from headwater.cli.output import console, emit, size, table, time_text

_SHADES = "·░▒▓█"
_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: From no load to the target: dark blue, blue, green, yellow, orange; above it red.
_COLOURS = ((13, 17, 52), (33, 78, 165), (46, 160, 103), (222, 203, 62), (240, 140, 40))
_ABOVE = (214, 40, 40)
_MARGIN = 12
_PNG_WIDTH, _PNG_HEIGHT = 720, 256


@click.command("scaling")
@click.argument("name")
@click.option("--hours", type=Number(0, 1e6, min_open=True), help="Only the last hours. Without: all that is remembered.")
@click.option("--png", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write the heat map as a picture.")
@click.option("--height", type=click.IntRange(2, 200), default=16, show_default=True, help="Lines of the heat map.")
@click.option("--events", type=click.IntRange(min=0), default=10, show_default=True, help="How many of the last scalings to list.")
@with_store
def scaling_command(target: Target, name: str, hours: float | None, png: str | None, height: int, events: int) -> None:
    """Show how a stream's segments followed its load, as a heat map: time to the right, keys upwards, a segment's rate as its colour."""
    with target.open() as store:
        stream = store.stream(name)
        history, policy = stream.scaling_history(), stream.scaling
        facts = {"name": stream.name, "epoch": stream.epoch, "scaling": asdict(policy), "segments_open": len(stream.segments())}
    now = datetime.now(UTC)
    end = max([now, *(sample.time for sample in history.samples[-1:])])
    since = end - timedelta(hours=hours) if hours is not None else None
    if png is not None:
        _write_png(png, name, draw(history, width=_PNG_WIDTH, height=_PNG_HEIGHT, now=now, since=since))
    if target.json:
        emit({**facts, **_history_json(history, since)})
        return
    if png is not None:
        console().print(f"{png} shows {name}")
        return
    out = console()
    wide = max(20, min(out.width if out.is_terminal else 100, 160) - _MARGIN - 1)
    colours = out.color_system is not None
    drawn = draw(history, width=wide, height=height * 2 if colours else height, now=now, since=since)
    counted = f"{facts['segments_open']} segment{'' if facts['segments_open'] == 1 else 's'} open, epoch {facts['epoch']}"
    out.print(f"{name}: {_policy_text(policy)}; {counted}")
    show(out, drawn, colours)
    _show_events(out, [event for event in history.events if since is None or event.time >= since], events)


def _policy_text(policy: hw.Scaling) -> str:
    if policy.kind == "fixed":
        return "scaled by hand"
    rate = f"{policy.target:,} events/s" if policy.kind == "event_rate" else f"{size(policy.target)}/s"
    most = f", at most {policy.max_segments}" if policy.max_segments is not None else ""
    return f"{rate} per segment, at least {policy.min_segments} segment{'' if policy.min_segments == 1 else 's'}{most}"


def _history_json(history: hw.ScalingHistory, since: datetime | None) -> dict[str, Any]:
    def recent(time: datetime | None) -> bool:
        return since is None or time is None or time >= since

    return {
        "segments": [
            {**life._asdict(), "made": time_text(life.made), "sealed": time_text(life.sealed) if life.sealed is not None else None}
            for life in history.segments
            if recent(life.sealed)
        ],
        "samples": [
            {**sample._asdict(), "time": time_text(sample.time), "rates": [rate._asdict() for rate in sample.rates]}
            for sample in history.samples
            if recent(sample.time)
        ],
        "events": [{**event._asdict(), "time": time_text(event.time)} for event in history.events if recent(event.time)],
    }


def show(out: Console, drawn: HeatMap, colours: bool) -> None:
    """Print a heat map. With colours each character is two cells, one above the other."""
    lines = len(drawn.columns[0]) // 2 if colours else len(drawn.columns[0])
    for line in range(lines - 1, -1, -1):
        label = "keys 1.0" if line == lines - 1 else "0.0" if line == 0 else ""
        text = Text(f"{label:>{_MARGIN - 2}} │")
        for column in drawn.columns:
            if colours:
                upper, lower = (_colour(column[2 * line + half], drawn.full) for half in (1, 0))
                text.append("▀", Style(color=upper, bgcolor=lower))
            else:
                text.append(_shade(column[line], drawn.full))
        out.print(text)
    width = len(drawn.columns)
    most = max(drawn.segments)
    bars = "".join(_EIGHTHS[max(1, round(count / most * 8))] if count else " " for count in drawn.segments)
    out.print(f"{'':>{_MARGIN - 2}} └{'─' * width}")
    out.print(f"{'segments':>{_MARGIN - 2}}  {bars} {most}")
    first, last = (time_text(time.replace(microsecond=0)) for time in (drawn.start, drawn.end))
    out.print(f"{'':>{_MARGIN}}{first}{last:>{max(1, width - len(first))}}")
    out.print(_legend(drawn, colours))


def _legend(drawn: HeatMap, colours: bool) -> Text:
    full = f"{drawn.full:,.4g} {drawn.unit}" + (" (the target)" if drawn.target else " (the highest)")
    text = Text(f"{'':>{_MARGIN}}0 ")
    if colours:
        for step in range(12):
            text.append("█", Style(color=_colour(drawn.full * step / 11, drawn.full)))
    else:
        text.append(_SHADES[:-1])
    text.append(f" {full}")
    if drawn.target:
        text.append(", above it ")
        text.append("█", Style(color=_colour(2 * drawn.full, drawn.full)) if colours else "")
        text.append(f"; highest {drawn.highest:,.4g}")
    return text


def _shade(rate: float | None, full: float) -> str:
    if rate is None:
        return " "
    if rate > full * 1.0001:
        return _SHADES[-1]
    return _SHADES[min(int(rate / full * (len(_SHADES) - 1)), len(_SHADES) - 2)]


def _colour(rate: float | None, full: float) -> Color:
    if rate is None:
        return Color.default()
    if rate > full * 1.0001:
        return Color.from_rgb(*_ABOVE)
    place = rate / full * (len(_COLOURS) - 1)
    index = min(int(place), len(_COLOURS) - 2)
    low, high = _COLOURS[index], _COLOURS[index + 1]
    return Color.from_rgb(*(a + (b - a) * (place - index) for a, b in zip(low, high, strict=True)))


def _show_events(out: Console, events: list[Any], limit: int) -> None:
    if not events or not limit:
        return
    kinds = [event.kind for event in events]
    out.print(f"\n{kinds.count('split'):,} splits and {kinds.count('merge'):,} merges by load, the last {min(limit, len(events))}:")
    shown = table("time", "epoch", "what", "segments", "became", "why", right=("epoch",))
    for event in events[-limit:]:
        numbers = (" ".join(map(str, some)) for some in (event.sealed, event.made))
        shown.add_row(time_text(event.time.replace(microsecond=0)), str(event.epoch), event.kind, *numbers, event.reason)
    out.print(shown)


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _write_png(path: str, name: str, drawn: HeatMap) -> None:
    try:
        from matplotlib.colors import LinearSegmentedColormap  # an extra, which only pictures need
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException("--png needs matplotlib: pip install 'headwater[plot]'") from None
    ramp = LinearSegmentedColormap.from_list("load", [_hex(colour) for colour in _COLOURS])
    colours = ramp.with_extremes(over=_hex(_ABOVE), bad="white")
    figure = Figure(figsize=(12, 6), layout="constrained")
    heat, counts = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    times = [drawn.start + (drawn.end - drawn.start) * index / len(drawn.columns) for index in range(len(drawn.columns) + 1)]
    cells = [[float("nan") if rate is None else rate for rate in row] for row in zip(*drawn.columns, strict=True)]
    heights = [row / len(cells) for row in range(len(cells) + 1)]
    mesh = heat.pcolormesh(times, heights, cells, cmap=colours, vmin=0, vmax=drawn.full * 1.0001, rasterized=True)
    label = f"{drawn.unit} of a segment" + (f", target {drawn.target:,}" if drawn.target else "")
    figure.colorbar(mesh, ax=heat, label=label, extend="max" if drawn.target else "neither")
    heat.set(title=name, ylabel="key space", ylim=(0, 1))
    counts.stairs(drawn.segments, times, fill=True, color="#214ea5")
    counts.set(ylabel="segments", ylim=(0, None), xlabel="time (UTC)")
    figure.autofmt_xdate()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise click.ClickException(f"{path} can't be written: {error.strerror}") from error
