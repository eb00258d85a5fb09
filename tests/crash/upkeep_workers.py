"""What the processes of the upkeep's crash tests do: they write, truncate, fork, delete and tend a store, and tell each ack."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection

import pyarrow as pa

import headwater as hw
from headwater.catalog import leases
from headwater.runtime import failpoints
from headwater.streams import upkeep
from tests.crash.processes import Place

EVENTS, TYPED, BYTES, SHORT = "up/events", "up/typed", "up/bytes", "up/short"
SCHEMA = pa.schema([("id", pa.string()), ("pad", pa.binary())])
ROUNDS = 4


def create_streams(store: hw.Store) -> None:
    store.create_stream(EVENTS, scaling=hw.Scaling.fixed(2), exist_ok=True)
    store.create_stream(TYPED, schema=SCHEMA, exist_ok=True)
    store.create_stream(BYTES, kind="bytes", exist_ok=True)
    store.create_stream(SHORT, retention=hw.Retention.by_size(20_000), exist_ok=True)


def tend(channel: Connection, place: Place, spec: str, seed: int, run: int) -> None:
    """Rounds of writing and of everything that makes work for upkeep, each followed by a round of it."""
    # A short lease: the next one need not wait long for what a killed one held.
    vars(upkeep).update(LEASE_SECONDS=0.3)
    vars(leases).update(_LEASE_US=300_000)
    rng = random.Random(seed * 10 + run)
    with place.open() as store:
        create_streams(store)
        failpoints.arm(spec)
        for turn in range(ROUNDS):
            _write(channel, store, rng, f"{run}.{turn}")
            _stir(store, rng, turn, f"{run}.{turn}")
            store.run_upkeep()
        channel.send("done")


def _write(channel: Connection, store: hw.Store, rng: random.Random, tag: str) -> None:
    for name in (EVENTS, TYPED, SHORT):
        with store.stream(name).writer() as writer:
            for size in (10, 3000, 70_000):
                acks = []
                for number in range(rng.randint(1, 3)):
                    id = f"{tag}.{size}.{number}"
                    value = {"id": id, "pad": b"." * size} if name == TYPED else id.encode() + b"|" + b"." * size
                    acks.append((id, writer.write(value, key=id)))
                for id, ack in acks:
                    ack.result()
                    channel.send((name, id))
    with store.stream(BYTES).byte_writer() as bytes_writer:
        bytes_writer.write(f"{tag};".encode().ljust(20, b"-"))
        bytes_writer.flush()
        channel.send((BYTES, tag))
    with store.transaction() as tx:
        for name in (EVENTS, SHORT):
            tx.write(name, f"{tag}.tx|".encode() + b"." * 300_000, key="t")
        tx.flush()
    channel.send((EVENTS, f"{tag}.tx"))


def _stir(store: hw.Store, rng: random.Random, turn: int, tag: str) -> None:
    stream, short = store.stream(EVENTS), store.stream(SHORT)
    if turn % 2 and len(stream.segments()) < 6:
        stream.split(rng.choice(stream.segments()).number)
    if turn % 2:
        fork = store.stream(TYPED).fork(f"up/fork-{tag}")
        assert sum(1 for _ in fork.read()) == sum(1 for _ in store.stream(TYPED).read())
        fork.seal()
        store.delete_stream(fork.name)
    if turn % 2 == 0:
        short.truncate(short.tail())
    aborted = store.transaction()
    aborted.write(EVENTS, b"never|" + b"." * 300_000)
    aborted.flush()
    aborted.abort()


def tend_in_background(channel: Connection, place: Place, spec: str = "") -> None:
    """Do the upkeep in the background, quickly, until killed."""
    vars(upkeep).update(UPKEEP_DELAY_SECONDS=0.01, _ROUND_SECONDS=0.02, LEASE_SECONDS=1.0, TIER_EXTENTS=20)
    vars(leases).update(_LEASE_US=1_000_000)
    failpoints.arm(spec)
    with hw.open(place.url, catalog=place.catalog, storage_options=place.options) as store:
        while not store._upkeep._is_held:
            time.sleep(0.005)
        channel.send("holds")
        channel.recv()


def tend_by_hand(channel: Connection, place: Place, spec: str) -> None:
    """One round by hand, with a short lease; says how it ended."""
    vars(upkeep).update(LEASE_SECONDS=1.0)
    vars(leases).update(_LEASE_US=1_000_000)
    failpoints.arm(spec)
    with place.open() as store:
        try:
            report = store.run_upkeep()
            channel.send((True, report.problems))
        except hw.HeadwaterError as error:
            channel.send((False, type(error).__name__))
        channel.recv()
