"""What the processes of these tests do. Each talks to its test over `channel`; an event is reported only after its ack."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

import headwater as hw
import headwater.catalog.postgres
import headwater.store
from headwater.catalog.sqlite import SqliteDatabase
from headwater.runtime import failpoints
from tests.crash.history import NAMED, ONE, SHORT, THREE, Acked, Op, create_streams, plan
from tests.crash.processes import Place


def write_plan(channel: Connection, place: Place, spec: str, seed: int, run: int) -> None:
    """Write what `history.plan` says, and go through the failpoints in `spec` on the way."""
    failpoints.arm(spec)
    with place.open() as store:
        create_streams(store)
        writers: dict[tuple[str, str], hw.Writer] = {("anonymous", name): store.stream(name).writer() for name in (ONE, THREE, SHORT)}
        writers |= {(id, name): store.stream(name).writer(id) for id, name in NAMED.items()}
        for number, group in enumerate(plan(seed, run)):
            acks = [(op, _give(writers[op.writer, op.stream], op)) for op in group.ops]
            for op, ack in acks:
                channel.send(_acked(op, ack))
            if group.action is not None:
                _act(store, group.action, random.Random(seed * 1000 + number))
        channel.send("done")


def _give(writer: hw.Writer, op: Op) -> hw.Ack:
    values = op.values()
    if len(values) == 1:
        return writer.write(values[0], key=op.keys[0], number=op.number)
    return writer.write_batch(pa.record_batch({"value": values, "k": list(op.keys)}), key="k", number=op.number)


def _acked(op: Op, ack: hw.Ack) -> list[Acked]:
    result = ack.result()
    if ack.duplicate:
        return []
    if len(op.ids) == 1:
        return [Acked(op.stream, op.ids[0], result)]
    assert sum(found.count for found in result) == len(op.ids)
    return [Acked(op.stream, id, None) for id in op.ids]


def _act(store: hw.Store, action: str, rng: random.Random) -> None:
    if action == "truncate":
        stream = store.stream(SHORT)
        stream.truncate(stream.tail())
        return
    stream = store.stream(THREE)
    segments = sorted(stream.segments(), key=lambda segment: segment.start)
    if action == "split" or len(segments) < 2:
        stream.split(rng.choice(segments).number)
    else:
        first = rng.randrange(len(segments) - 1)
        stream.merge([segments[first].number, segments[first + 1].number])


def obey(channel: Connection, place: Place, spec: str = "", lock_seconds: float | None = None) -> None:
    """Do what the test says, one command at a time, and answer with the result or with an error's name and text."""
    if lock_seconds is not None:
        vars(headwater.store)["SqliteDatabase"] = functools.partial(SqliteDatabase, lock_seconds=lock_seconds)
        vars(headwater.catalog.postgres)["LOCK_SECONDS"] = lock_seconds
    failpoints.arm(spec)
    puppet = _Puppet(channel, place)
    while True:
        try:
            command, *args = channel.recv()
        except EOFError:
            return
        try:
            channel.send((True, getattr(puppet, command)(*args)))
        except hw.HeadwaterError as error:
            channel.send((False, type(error).__name__, str(error)))


class _Puppet:
    def __init__(self, channel: Connection, place: Place) -> None:
        self._channel = channel
        self._place = place
        self._store = place.open()
        self._writers: dict[tuple[str, str | None], hw.Writer] = {}
        self._acks: list[hw.Ack] = []

    def arm(self, spec: str) -> None:
        failpoints.arm(spec)

    def open(self, stream: str, id: str | None = None) -> int:
        writer = self._writers[stream, id] = self._store.stream(stream).writer(id)
        return writer.last_number if id is not None else 0

    def give(self, stream: str, id: str | None, values: list[bytes], key: str | None = None) -> None:
        """Buffer events: their acks are asked for later."""
        self._acks += [self._writers[stream, id].write(value, key=key) for value in values]

    def give_batch(self, stream: str, id: str | None, values: list[bytes], keys: list[str]) -> None:
        self._acks.append(self._writers[stream, id].write_batch(pa.record_batch({"value": values, "k": keys}), key="k"))

    def acks(self) -> list[Any]:
        """The positions of all that was given since the last time."""
        positions = [ack.result() for ack in self._acks]
        self._acks.clear()
        return positions

    def write(self, stream: str, id: str | None, values: list[bytes]) -> list[hw.Position]:
        acks = [self._writers[stream, id].write(value) for value in values]
        return [ack.result() for ack in acks]

    def read(self, stream: str) -> list[bytes]:
        return [event.value for event in self._store.stream(stream).read()]

    def limit_file_size(self, limit_bytes: int | None) -> None:
        """No file may grow beyond this, as with `ulimit -f`. Only the soft limit, so that it can be taken back."""
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes if limit_bytes is not None else hard, hard))

    def close(self) -> None:
        self._store.close()


def append_one_by_one(channel: Connection, place: Place, stream: str, name: str, seconds: float) -> None:
    """Wait for the ack of each event before the next one, for some time; says how many and the longest wait."""
    with place.open() as store:
        writer = store.stream(stream).writer()
        writer.write(f"{name}.first").result()
        channel.send("ready")
        channel.recv()
        count, longest, end = 0, 0.0, time.monotonic() + seconds
        while (begun := time.monotonic()) < end:
            writer.write(f"{name}.{count}", key=name).result()
            longest = max(longest, time.monotonic() - begun)
            count += 1
        channel.send((count, longest))


def append_pipelined(channel: Connection, place: Place, stream: str, name: str, keys: int, seed: int) -> None:
    """Write without waiting, small and large, by event and by batch, until told to end; says how many each key got."""
    rng = random.Random(seed)
    counts = dict.fromkeys((f"{name}.k{key}" for key in range(keys)), 0)
    with place.open() as store, store.stream(stream).writer() as writer:
        channel.send("ready")
        while not channel.poll():
            acks = []
            for _ in range(rng.randint(1, 20)):
                rows, padding = rng.choice((1, 1, 1, 30)), b"." * rng.choice((0, 0, 0, 9000))
                chosen = [rng.choice(list(counts)) for _ in range(rows)]
                values = []
                for key in chosen:
                    values.append(b"%s|%d|%s" % (key.encode(), counts[key], padding))
                    counts[key] += 1
                if rows == 1:
                    acks.append(writer.write(values[0], key=chosen[0]))
                else:
                    acks.append(writer.write_batch(pa.record_batch({"value": values, "k": chosen}), key="k"))
            if rng.random() < 0.3:
                acks[rng.randrange(len(acks))].result()
    channel.send(counts)


def follow(channel: Connection, place: Place, stream: str) -> None:
    """Report each event of a stream with the moment it was seen, as it comes."""
    store = place.open()
    channel.send("ready")
    for event in store.stream(stream).read(follow=True):
        channel.send((event.value, time.monotonic()))


def follow_when_told(channel: Connection, place: Place, stream: str) -> None:
    """Take the next events of a follower only when told how many; hold on to it in between."""
    store = place.open()
    events = store.stream(stream).read(follow=True)
    channel.send("ready")
    while wanted := channel.recv():
        channel.send([next(events).value for _ in range(wanted)])


def write_and_fork(channel: Connection, place: Place, stream: str, children: Any) -> None:
    """Fork while a thread writes; parent and child go on with the same store. Each reports what was acked to it."""
    store = place.open()
    writer = store.stream(stream).writer()
    writer.write(b"parent.before").result()
    over = threading.Event()
    busy = threading.Thread(target=_write_until, args=(store, stream, over), daemon=True)
    busy.start()
    waiting = [writer.write(b"parent.waiting.%d" % number) for number in range(50)]
    pid = os.fork()
    if not pid:
        try:
            _write_in_child(children, writer, waiting, store, stream)
        finally:
            os._exit(0)
    for ack in waiting:
        ack.result()
    over.set()
    busy.join()
    for number in range(50):
        writer.write(b"parent.after.%d" % number).result()
    channel.send(("parent", pid))
    signal.pause()


def fork_and_write(channel: Connection, place: Place, stream: str, children: Any) -> None:
    """Fork a child that waits, then be stopped in the middle of a commit."""
    store = place.open()
    writer = store.stream(stream).writer()
    writer.write(b"parent").result()
    if not os.fork():
        try:
            children.send("ready")
            children.recv()
            writer.write(b"child").result()
            children.send("done")
        finally:
            os._exit(0)
    channel.recv()
    failpoints.arm("append.applied=stop")
    writer.write(b"never acked").result()


def _write_until(store: hw.Store, stream: str, over: threading.Event) -> None:
    writer = store.stream(stream).writer()
    count = 0
    while not over.is_set():
        writer.write(b"parent.busy.%d" % count).result()
        count += 1


def _write_in_child(channel: Connection, writer: hw.Writer, waiting: list[hw.Ack], store: hw.Store, stream: str) -> None:
    errors = []
    for ack in waiting:
        try:
            ack.result(timeout=30)
        except (hw.HeadwaterError, TimeoutError) as error:
            errors.append(type(error).__name__)
    for number in range(50):
        writer.write(b"child.first.%d" % number).result()
    channel.send(errors)
    channel.recv()
    for number in range(400):
        writer.write(b"child.second.%d" % number).result()
    store.stream(stream).writer("named").write(b"child.named").result()
    channel.send([event.value for event in store.stream(stream).read()])
