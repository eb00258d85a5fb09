"""The processes of a history: writers, transactions, readers and a scaler, each with a log of what it did and what was acknowledged.

Each line is written with one call before the next thing is done, so a process killed anywhere leaves all but what it was doing.
"""

from __future__ import annotations

import json
import os
import random
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.catalog import commits, groups, segments
from headwater.catalog.database import Tx
from headwater.model.segmentmap import Progress, SegmentMap
from headwater.readers import reader as reader_module
from headwater.runtime import failpoints
from tests.crash.processes import Place

IN, OUT, SIDE, TABLE = "history/in", "history/out", "history/side", "history/table"
AUTO, COPY = "auto", "copy"
KEYS = [f"k{number}" for number in range(12)]
#: Who does what; each is one process, killed and begun again.
ROLES = ("writer", "tx1", "tx2", "auto1", "auto2", "copy1", "copy2", "scaler")
FAILPOINTS: dict[str, tuple[str, ...]] = {
    "writer": ("append.begun", "append.applied", "append.committed"),
    "tx": ("txn.stored", "txn.staged", "txn.applied", "txn.committed", "txn.committed", "txn.prepared", "txn.rolled", "txn.aborted"),
    "auto": (),
    "copy": ("txn.applied", "txn.committed", "txn.prepared"),
    "scaler": ("scale.applied", "scale.committed"),
}


class Log:
    """The log of one life of one process."""

    def __init__(self, folder: Path, role: str, life: int) -> None:
        self.folder = folder
        self._file = os.open(folder / f"{role}.{life:03d}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, what: str, **facts: Any) -> None:
        os.write(self._file, json.dumps({"what": what, "at": time.monotonic(), **facts}).encode() + b"\n")


def read_log(folder: Path, role: str) -> list[dict[str, Any]]:
    """What a role did, over all its lives. What its last write left torn is left out."""
    lines = b"".join(path.read_bytes() + b"\n" for path in sorted(folder.glob(f"{role}.*"))).split(b"\n")
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def create_history_streams(store: hw.Store) -> None:
    for name in (IN, OUT, SIDE):
        store.create_stream(name, scaling=hw.Scaling.fixed(2), exist_ok=True)
    store.table(TABLE)
    for group in (AUTO, COPY):
        store.reader_group(group, [IN])


def live(channel: Connection, place: Place, folder: str, role: str, life: int, seed: int, fault: str | None) -> None:
    """One life of one process, until it is killed."""
    if fault is not None:
        FAULTS[fault]()
    rng = random.Random(f"{seed} {role} {life}")
    act = {"writer": _write, "tx": _transact, "auto": _read, "copy": _copy, "scaler": _scale}[role.rstrip("12")]
    log = Log(Path(folder), role, life)
    # Beside kills at any moment, those at the moments that matter.
    names = FAILPOINTS[role.rstrip("12")]
    if names and rng.random() < 0.5:
        failpoints.arm(f"{rng.choice(names)}=kill@{rng.randint(1, 6)}")
    try:
        with place.open() as store:
            log.add("born")
            channel.send("ready")
            act(channel, store, role, life, rng, log, Path(folder))
    except BaseException:
        log.add("failed", error=traceback.format_exc())
        raise


def _pause(channel: Connection, seconds: float) -> None:
    """Let the others run; nothing ever comes over the channel."""
    channel.poll(seconds)


def _write(channel: Connection, store: hw.Store, role: str, life: int, rng: random.Random, log: Log, folder: Path) -> None:
    """Anonymous events, and those of a named writer, whose numbers go on over all its lives."""
    anonymous, named = store.stream(IN).writer(), store.stream(IN).writer("named")
    count, number = 0, named.last_number
    while True:
        given = []
        for _ in range(rng.randint(1, 8)):
            if rng.random() < 0.4:
                number += 1
                id = f"named:{number}"
                ack = named.write(id, key=rng.choice(KEYS), number=number)
            else:
                count += 1
                id = f"{role}{life}:{count}"
                ack = anonymous.write(id, key=rng.choice(KEYS))
            given.append((id, ack))
        for id, ack in given:
            ack.result()
            log.add("acked", id=id)
        _pause(channel, 0.01)


def _transact(channel: Connection, store: hw.Store, role: str, life: int, rng: random.Random, log: Log, folder: Path) -> None:
    """Transactions over two streams and a table. A sequence whose outcome is not in the log is done again, with the same marker."""
    mine = read_log(folder, role)
    planned = max((line["sequence"] for line in mine if line["what"] == "planned"), default=0)
    ended = max((line["sequence"] for line in mine if line["what"] == "committed"), default=0)
    sequence, attempt = max(planned, ended + 1), 0
    while True:
        tag = f"{role}.{sequence}.{life}.{attempt}"
        tx = store.transaction(marker=hw.Marker(role, sequence))
        events = rng.randint(1, 12)
        begun = rng.random() < 0.7
        log.add("planned", sequence=sequence, tag=tag, events=events, id=tx.id if begun else None)
        gives_up = rng.random() < 0.15
        for index in range(events):
            stream = (IN, SIDE)[index % 2]
            padding = "." * 70_000 if index == 0 and rng.random() < 0.1 else ""
            tx.write(stream, f"{tag}:{index}|{padding}", key=rng.choice(KEYS))
            if begun and rng.random() < 0.15:
                tx.flush()
                _pause(channel, rng.uniform(0, 0.05))
        tx.put(TABLE, tag, str(events).encode())
        if gives_up:
            tx.abort()
            log.add("aborted", tag=tag)
            attempt += 1
        else:
            commit = tx.commit()
            log.add("committed", sequence=sequence, tag=tag, id=commit.id, repeated=commit.repeated)
            sequence, attempt = sequence + 1, 0
        _pause(channel, 0.01)


def _read(channel: Connection, store: hw.Store, role: str, life: int, rng: random.Random, log: Log, folder: Path) -> None:
    """Read, and write down what was handed out. Now and then leave the group, cleanly or not, and come again."""
    while True:
        with store.reader_group(AUTO).reader(role) as reader:
            seen = time.monotonic()
            for _ in range(rng.randint(50, 400)):
                try:
                    event = reader.read(timeout=0.2)
                except hw.FencedError as error:
                    log.add("fenced", idle=time.monotonic() - seen, error=str(error))
                    break
                seen = time.monotonic()
                if event is not None:
                    log.add("handed", id=event_id(event), place=event.position)


def _copy(channel: Connection, store: hw.Store, role: str, life: int, rng: random.Random, log: Log, folder: Path) -> None:
    """Copy each event to another stream, in one transaction with the reader's position."""
    while True:
        with store.reader_group(COPY).reader(role, commit="manual") as reader:
            seen = time.monotonic()
            for _ in range(rng.randint(5, 40)):
                try:
                    copy_some(store, reader, rng)
                except hw.FencedError as error:
                    log.add("fenced", idle=time.monotonic() - seen, error=str(error))
                    break
                seen = time.monotonic()


def copy_some(store: hw.Store, reader: hw.Reader, rng: random.Random, timeout: float = 0.1) -> int:
    """One transaction: some events, their copies, and the position behind them. Now and then it is aborted."""
    tx = store.transaction()
    copied = 0
    for _ in range(rng.randint(1, 20)):
        event = reader.read(timeout=timeout)
        if event is None:
            break
        tx.write(OUT, event_id(event), key=event.key)
        copied += 1
    tx.commit_reader(reader)
    if rng.random() < 0.1:
        tx.abort()
        return 0
    tx.commit()
    return copied


def _scale(channel: Connection, store: hw.Store, role: str, life: int, rng: random.Random, log: Log, folder: Path) -> None:
    """Split and merge, between 1 and 6 segments."""
    while True:
        stream = store.stream(rng.choice((IN, IN, SIDE, OUT)))
        opened = sorted(stream.segments(), key=lambda segment: segment.start)
        try:
            if len(opened) < 2 or (len(opened) < 6 and rng.random() < 0.5):
                stream.split(rng.choice(opened).number, parts=rng.randint(2, 3))
            else:
                first = rng.randrange(len(opened) - 1)
                stream.merge([segment.number for segment in opened[first : first + rng.randint(2, 3)]])
        except hw.NotFoundError:
            pass  # A transaction rolled them meanwhile.
        log.add("scaled", stream=stream.name)
        _pause(channel, rng.uniform(0.05, 0.3))


def event_id(event: hw.Event) -> str:
    return str(event.value.partition(b"|")[0].decode())


# Faults, to be planted in every process of a history: the checker must find each.


def _commit_past_what_was_handed_out() -> None:
    """An auto reader commits one event more than it has handed out."""
    commit = groups.commit_positions.function

    def faulty(tx: Tx, group: int, reader: str, generation: int, of_group: int, positions: dict[tuple[int, int], int], *rest: Any) -> Any:
        ahead = {}
        for key, number in positions.items():
            row = segments.find_segment(tx, *key)
            ahead[key] = min(number + 1, row.tail) if row is not None else number
        return commit(tx, group, reader, generation, of_group, ahead, *rest)

    groups.commit_positions.function = faulty


def _skip_a_staged_block() -> None:
    """A commit moves all staged blocks but the last, if there are several."""
    commit = commits.commit

    def faulty(tx: Tx, id: str, *rest: Any) -> Any:
        found = tx.run("SELECT ordinal FROM txn_extent WHERE txn = ? AND expected_tail IS NULL ORDER BY ordinal", (id,))
        if len(found) > 1:
            tx.run("DELETE FROM txn_extent WHERE txn = ? AND ordinal = ?", (id, found[-1][0]))
        return commit(tx, id, *rest)

    vars(commits)["commit"] = faulty


def _let_successors_in_early() -> None:
    """A successor may be read as soon as its predecessors are sealed, before they are read to their end."""
    advance = SegmentMap.advance

    def faulty(self: SegmentMap[Any], places: Any, ends: Any = None) -> dict[int, Progress]:
        found = advance(self, places, ends)
        for number, row in self.segments.items():
            near = list(self.front(found).over(row.keys))
            if number not in found and near and all(other < number for other in near):
                found[number] = Progress(0, False)
        return found

    SegmentMap.advance = faulty  # type: ignore[method-assign]


def _forget_the_reader() -> None:
    """A transaction commits the output of a reader without its position."""
    vars(groups)["apply_positions"] = lambda tx, changes: None


def _ignore_the_marker() -> None:
    """A marker that is committed already is not looked at. Only a commit that is done again meets it."""
    FAILPOINTS["tx"] = ("txn.committed",)
    vars(commits)["_check_marker"] = lambda *args: None


def _hand_out_without_order() -> None:
    """A reader that comes back after a rewind goes on where it was instead of at the committed position."""
    reader_module.Reader.rewind = lambda self: None  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "an auto reader commits past what it handed out": _commit_past_what_was_handed_out,
    "a commit skips one staged block": _skip_a_staged_block,
    "a successor is read before its predecessors are done": _let_successors_in_early,
    "a transaction leaves out its reader's position": _forget_the_reader,
    "an abort does not rewind its reader": _hand_out_without_order,
    "a marker is not looked at": _ignore_the_marker,
}
