"""What a worker was given, by seed, and what must be true of the streams afterwards, wherever it was killed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import headwater as hw

ONE, THREE, SHORT = "crash/one", "crash/three", "crash/short"
#: The writers with names, each with its stream. Their input is the same in each run: a source that can be read again.
NAMED = {"n1": ONE, "n3": THREE}
GROUPS = 12
LARGE_BYTES = 100_000


@dataclass(frozen=True)
class Op:
    """One `write`, or one `write_batch` if there are several ids."""

    writer: str
    stream: str
    ids: tuple[str, ...]
    keys: tuple[str, ...]
    number: int | None
    large: bool

    def values(self) -> list[bytes]:
        return [id.encode() + b"|" + b"." * (LARGE_BYTES if self.large else len(id) * 7) for id in self.ids]


@dataclass(frozen=True)
class Group:
    """Ops given at once; then all acks are waited for, and something is done to a stream."""

    ops: list[Op]
    action: str | None


@dataclass(frozen=True)
class Acked:
    """What a worker said was durable; a batch's events have no position of their own."""

    stream: str
    id: str
    position: hw.Position | None


def plan(seed: int, run: int) -> list[Group]:
    """The input of a run. Anonymous events differ in each; those of named writers don't."""
    rng = random.Random(seed)
    numbers = dict.fromkeys(NAMED, 0)
    groups = []
    for index in range(GROUPS):
        ops = []
        for place in range(rng.randint(4, 8)):
            writer, stream = rng.choice([*NAMED.items(), ("anonymous", ONE), ("anonymous", THREE), ("anonymous", SHORT)])
            rows = rng.choice((1, 1, 1, 5, 40))
            number = None
            if writer in NAMED:
                number = numbers[writer] = numbers[writer] + rng.randint(1, 3)
            name = writer if writer in NAMED else f"a{run}"
            ids = tuple(f"{name}.{stream[6:]}.{index:02d}.{place:02d}.{row:02d}" for row in range(rows))
            keys = tuple(f"k{rng.randrange(7)}" for _ in ids)
            ops.append(Op(writer, stream, ids, keys, number, False))
        # Every other group is too large for the catalog and goes to storage; every group truncates something.
        ops.append(Op("anonymous", THREE, (f"a{run}.three.{index:02d}.98.00",), ("k1",), None, index % 2 == 1))
        ops.append(Op("anonymous", SHORT, (f"a{run}.short.{index:02d}.99.00",), ("k0",), None, False))
        groups.append(Group(ops, rng.choice(("split", "merge")) if index % 3 == 2 else "truncate" if index % 3 == 1 else None))
    return groups


def create_streams(store: hw.Store) -> None:
    for name, segments in ((ONE, 1), (THREE, 3), (SHORT, 2)):
        store.create_stream(name, scaling=hw.Scaling.fixed(segments), exist_ok=True)


@dataclass
class Found:
    """What a stream holds."""

    heads: dict[int, int] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    at: dict[hw.Position, str] = field(default_factory=dict)


def check(store: hw.Store, seed: int, runs: Iterable[int], acked: Iterable[Acked], *, complete: bool = False) -> None:
    """Whatever was acked is there, everything once, in order, without gaps, batches whole, named writers' events a prefix.

    `complete`: the last run went to its end, so that all it was given is there.
    """
    found = {name: _read(store, name) for name in (ONE, THREE, SHORT)}
    for item in acked:
        stream = found[item.stream]
        if item.position is not None and item.position.number >= stream.heads.get(item.position.segment, 1 << 62):
            assert stream.at.get(item.position) == item.id, f"acked as {item}"
        elif item.stream != SHORT:
            assert item.id in stream.at.values(), f"acked, and lost: {item}"
    runs = list(runs)
    for run in runs:
        plans = [op for group in plan(seed, run) for op in group.ops]
        for name in (ONE, THREE):
            present = set(found[name].ids)
            for op in plans:
                if op.stream == name:
                    assert len(present & set(op.ids)) in (0, len(op.ids)), f"half a batch: {op.ids}"
                    assert not complete or run != runs[-1] or present >= set(op.ids), f"not stored: {op.ids}"
    for writer, name in NAMED.items():
        given = [id for group in plan(seed, 0) for op in group.ops if op.writer == writer for id in op.ids]
        stored = {id for id in found[name].ids if id.startswith(f"{writer}.")}
        assert stored == set(given[: len(stored)]), f"not a prefix of what {writer} was given"
        assert not complete or len(stored) == len(given), f"{writer} is not complete"


def _read(store: hw.Store, name: str) -> Found:
    stream = store.stream(name)
    found = Found()
    order: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    numbers: dict[int, list[int]] = defaultdict(list)
    for event in stream.read():
        id = event.value.partition(b"|")[0].decode()
        found.ids.append(id)
        found.at[event.position] = id
        order[id.partition(".")[0], event.key].append(id)
        numbers[event.position.segment].append(event.position.number)
    assert len(found.ids) == len(set(found.ids)), f"stored twice in {name}: {sorted(found.ids)}"
    for (origin, key), ids in order.items():
        assert ids == sorted(ids), f"out of order in {name}: what {origin} wrote with key {key!r}"
    for segment, seen in numbers.items():
        assert seen == list(range(seen[0], seen[0] + len(seen))), f"a gap in segment {segment} of {name}"
        assert name == SHORT or seen[0] == 0, f"segment {segment} of {name} begins at {seen[0]}"
        found.heads[segment] = seen[0]
    opened = sorted(stream.segments(), key=lambda segment: segment.start)
    bounds = [0.0, *(segment.end for segment in opened)]
    assert bounds[:-1] == [segment.start for segment in opened] and bounds[-1] == 1.0, (
        f"the segments of {name} don't tile the keys: {bounds}"
    )
    for row in opened:
        assert row.events == len(numbers[row.number]), f"segment {row.number} of {name} says it has {row.events} events"
    return found
