"""From nothing installed to the first event read, as someone new goes: a fresh environment, the client, the server, one event."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.peers import fetch
from benchmarks.peers.figures import OWN, Figure
from benchmarks.peers.kafka import KafkaPeer
from benchmarks.peers.redis import RedisPeer
from benchmarks.peers.work import Sizes

_ROOT = Path(__file__).parents[2]
_FIRST = """
import sys, headwater as hw
with hw.open(sys.argv[1]) as store:
    stream = store.create_stream("bench/first")
    with stream.writer() as writer:
        writer.write(b"hello").result()
    assert next(stream.read()).value == b"hello"
"""


def installs(sizes: Sizes, folder: Path) -> Iterator[Figure]:
    """Downloads are those of this machine's registries, and count: pip's own cache is not used."""
    if not sizes.install:
        return
    folder.mkdir(parents=True)
    own = _timed(lambda: _with_client(folder / "own", [str(_ROOT)], _FIRST))
    yield Figure("start-up", "nothing installed to first event read", OWN, own, "s", less_is_better=True)
    for peer, client, get in ((KafkaPeer(), "confluent-kafka", _get_kafka), (RedisPeer(), "redis", fetch.fetch_redis)):
        begun = time.monotonic()
        _with_client(folder / peer.name, [client], "")
        get(folder / f"{peer.name}-cache")
        with peer.running(folder / f"{peer.name}-data") as running:
            running.client.create("first")
            running.client.producer("first").write([(b"hello", b"key")])
            assert running.client.read("first", 1) == 5
        taken = time.monotonic() - begun
        note = "and Java" if peer.name == "Kafka" else ""
        yield Figure("start-up", "nothing installed to first event read", peer.name, taken, "s", less_is_better=True, note=note)


def _get_kafka(cache: Path) -> object:
    return fetch.fetch_jars(fetch.KAFKA, cache)


def _with_client(folder: Path, packages: Sequence[str], script: str) -> None:
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages], check=True, timeout=900, env=_plain())
    subprocess.run([python, "-c", script, folder / "store"], check=True, timeout=300, env=_plain())


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _timed(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    work()
    return time.monotonic() - begun
