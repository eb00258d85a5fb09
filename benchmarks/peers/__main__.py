"""`python -m benchmarks.peers`: every system does the same work, one after the other, and one table says who is how much faster."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console

from benchmarks.peers import acks, figures, growth, install, spark
from benchmarks.peers.figures import Figure, Line, make_lines, make_markdown, make_table
from benchmarks.peers.files import FilesPeer
from benchmarks.peers.headwater import HeadwaterPeer
from benchmarks.peers.kafka import KafkaPeer
from benchmarks.peers.nats import NatsPeer
from benchmarks.peers.peer import Peer
from benchmarks.peers.pravega import PravegaPeer
from benchmarks.peers.redis import RedisPeer
from benchmarks.peers.work import DEFAULT, JOBS, QUICK, Sizes, Trial, first_event, warm_up

#: The jobs that each peer can do. What is synced reads like what is not.
_WRITING = ("idle-latency", "write", "bulk", "latency", "transactions")
PEERS: dict[str, tuple[Peer, Sequence[str]]] = {
    "headwater": (HeadwaterPeer(), tuple(JOBS)),
    "kafka": (KafkaPeer(), tuple(JOBS)),
    "kafka-synced": (KafkaPeer(synced=True), _WRITING),
    "redis": (RedisPeer(), tuple(JOBS)),
    # Its Python client has no transactions.
    "nats": (NatsPeer(), ("idle-latency", "write", "bulk", "read", "latency")),
    "nats-synced": (NatsPeer(synced=True), ("write", "bulk")),
    "pravega": (PravegaPeer(), tuple(JOBS)),
    "parquet": (FilesPeer("Parquet"), ("bulk",)),
    "delta": (FilesPeer("Delta"), ("bulk",)),
}
#: These bring their own peers.
Alone = Callable[[Sizes, Path], Iterator[Figure]]
ALONE: dict[str, Alone] = {
    "acks": acks.acks,
    "spark-scan": spark.scans,
    "spark-stream": spark.streams,
    "growth": growth.growth,
    "install": install.installs,
}
#: The order of the table.
ORDER = (
    "write-events",
    "write-bulk",
    "read-events",
    "read-batches",
    "latency",
    "transactions",
    "acks",
    "spark-scan",
    "spark-stream",
    "growth",
    "cost",
    "start-up",
)


@click.command()
@click.option("--only", "names", multiple=True, type=click.Choice([*JOBS, *ALONE]), help="Do this work; may be given again.")
@click.option(
    "--peer", "chosen", multiple=True, type=click.Choice(list(PEERS)), help="Beside this one; may be given again. All by default."
)
@click.option("--quick", is_flag=True, help="So little of each that it takes a few minutes. The figures mean less.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--markdown", is_flag=True, help="Print the table as docs/benchmarks.md has it.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw the ratios into this file.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="On the disk to measure; a temporary one by default.")
def main(
    names: tuple[str, ...], chosen: tuple[str, ...], quick: bool, as_json: bool, markdown: bool, png: Path | None, folder: Path | None
) -> None:
    """Measure headwater beside Kafka, Redis, NATS, Pravega, UmaDB, and Spark on files."""
    progress = Console(stderr=True)
    # So that the servers end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if quick else DEFAULT
    with tempfile.TemporaryDirectory(prefix="headwater-peers-", dir=folder) as base:
        found = run(sizes, Path(base), names or (*JOBS, *ALONE), chosen or tuple(PEERS), progress.log)
    lines = make_lines(found, ORDER)
    from benchmarks.__main__ import describe_machine  # brings all of the other benchmarks, and Spark with them

    machine = {**describe_machine(), "date": datetime.now(UTC).date().isoformat(), "peers": versions(found)}
    if png is not None:
        from benchmarks.peers import chart  # matplotlib is an extra

        chart.draw(lines, png)
    if as_json:
        print(
            json.dumps({"machine": machine, "lines": [line.to_json() for line in lines], "figures": [f.to_json() for f in found]}, indent=2)
        )
    elif markdown:
        print(make_markdown(lines))
    else:
        _show(lines, machine)


def run(sizes: Sizes, base: Path, names: Sequence[str], chosen: Sequence[str], say: Callable[[str], None]) -> list[Figure]:
    """All figures of these jobs and peers. A peer that can't be run is said so and left out; headwater goes first and last."""
    found: list[Figure] = []
    jobs = [name for name in names if name in JOBS]
    others = [name for name in chosen if name != "headwater"]
    for turn, name in enumerate(["headwater", *others, *(["headwater"] if others else [])] if jobs else []):
        peer, able = PEERS[name]
        try:
            for figure in _try_peer(peer, [job for job in jobs if job in able], sizes, base / f"{turn}-{name}", say):
                found.append(figure)
                say(f"{figure.peer}: {figure.job}, {figure.variant}: {figures.readable(figure.value)} {figure.unit} {figure.note}")
        except Exception as error:
            # A peer's own errors are of many kinds, and none is a reason to lose what the others have shown.
            if name == "headwater":
                raise
            say(f"{peer.name} could not be measured further: {type(error).__name__}: {error}")
    for name in names:
        if name in ALONE:
            for figure in ALONE[name](sizes, base / name):
                found.append(figure)
                say(f"{figure.peer}: {figure.job}, {figure.variant}: {figures.readable(figure.value)} {figure.unit} {figure.note}")
    return found


def _try_peer(peer: Peer, jobs: Sequence[str], sizes: Sizes, folder: Path, say: Callable[[str], None]) -> Iterator[Figure]:
    if not jobs:
        return
    version = peer.version
    say(f"{peer.name} {version}: {peer.promise}")
    begun = time.monotonic()
    with peer.running(folder / "data") as running:
        trial = Trial(peer, running, sizes, folder)
        if not isinstance(peer, FilesPeer):
            yield first_event(trial, time.monotonic() - begun)
            warm_up(trial)
        for job in jobs:
            yield from JOBS[job](trial)


def versions(found: Sequence[Figure]) -> dict[str, str]:
    """Of those that were measured, with what their ack promises."""
    measured = {figure.peer for figure in found}
    return {peer.name: f"{peer.version}: {peer.promise}" for peer, _ in PEERS.values() if peer.name in measured}


def _show(lines: Sequence[Line], machine: Mapping[str, object]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170)
    title = (
        f"headwater {machine['headwater']}, Python {machine['python']}, {machine['cores']} cores, {machine['system']}, {machine['date']}"
    )
    console.print(make_table(lines, title))
    peers = machine["peers"]
    assert isinstance(peers, dict)
    for name, text in peers.items():
        console.print(f"{name} {text}", style="dim")


if __name__ == "__main__":
    main()
