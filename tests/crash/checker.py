"""What must be true of a store after a history of `history_workers`, whoever was killed when."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import headwater as hw
from headwater.check import check_store
from tests.crash.history_workers import AUTO, COPY, IN, OUT, ROLES, SIDE, TABLE, copy_some, event_id, read_log

#: A reader that did not get to run for this long may have been taken for dead.
PATIENT_SECONDS = 5.0


class Broken(AssertionError):
    """The history can't be: a promise was broken."""


class Checker:
    """Looks at a store whose processes are all gone. Each check raises Broken with what it found."""

    def __init__(self, store: hw.Store, folder: Path, cuts: list[hw.Cut]) -> None:
        self._store = store
        self._cuts = cuts
        self._logs = {role: read_log(folder, role) for role in ROLES}
        self._events = {name: list(store.stream(name).read()) for name in (IN, SIDE, OUT)}
        self._ids = {name: [event_id(event) for event in events] for name, events in self._events.items()}

    def check(self) -> dict[str, int]:
        """Check everything; returns how much there was of it."""
        for line in self._lines("failed"):
            raise Broken(f"a process failed: {line['error']}")
        self._check_writers()
        self._check_transactions()
        self._check_order()
        self._check_cuts()
        self._check_auto_group()
        self._check_copies(self._store.reader_group(COPY).positions())
        self._drain()
        self._check_copies(self._store.stream(IN).tail())
        report = check_store(self._store)
        require(report.ok, f"the store is damaged: {report.problems[:3]}")
        return {
            "events": len(self._ids[IN]),
            "acked": len(self._lines("acked")),
            "transactions": len(self._lines("committed")),
            "aborted": len(self._lines("aborted")),
            "handed": len(self._lines("handed")),
            "copied": len(self._ids[OUT]),
            "scaled": len(self._lines("scaled")),
            "lives": len(self._lines("born")),
        }

    def _lines(self, what: str) -> list[dict[str, Any]]:
        return [line for lines in self._logs.values() for line in lines if line["what"] == what]

    def _check_writers(self) -> None:
        for name in (IN, SIDE, OUT):
            twice = [id for id, count in Counter(self._ids[name]).items() if count > 1]
            require(not twice, f"stored twice in {name}: {twice[:5]}")
        stored = set(self._ids[IN])
        lost = [line["id"] for line in self._lines("acked") if line["id"] not in stored]
        require(not lost, f"acked, and lost: {lost[:5]}")
        numbers = sorted(int(id.partition(":")[2]) for id in stored if id.startswith("named:"))
        require(numbers == list(range(1, len(numbers) + 1)), "a named writer's events are not a prefix of what it was given")

    def _check_transactions(self) -> None:
        """Each attempt is in both streams and in the table as it was planned, or nowhere; each sequence once."""
        found: dict[str, set[str]] = defaultdict(set)
        for name in (IN, SIDE):
            for id in self._ids[name]:
                if id.startswith("tx"):
                    found[id.partition(":")[0]].add(id)
        puts = Counter(change.key for change in self._store.table(TABLE).changes())
        planned = {line["tag"]: line for line in self._lines("planned")}
        for tag in found.keys() | puts.keys():
            wanted = {f"{tag}:{index}" for index in range(planned[tag]["events"])}
            require(found[tag] == wanted, f"transaction {tag} is not whole: {len(found[tag])} of {len(wanted)} events")
            require(puts[tag] == 1 and self._store.table(TABLE).get(tag) is not None, f"transaction {tag} is not whole in the table")
        sequences = Counter(tuple(tag.split(".")[:2]) for tag in puts)
        twice = [sequence for sequence, count in sequences.items() if count > 1]
        require(not twice, f"committed twice, in spite of their markers: {twice[:5]}")
        for line in self._lines("committed"):
            require(tuple(line["tag"].split(".")[:2]) in sequences, f"committed, and lost: {line}")
            require((line["tag"] in puts) != line["repeated"], f"a commit that was {'repeated' if line['repeated'] else 'new'}: {line}")
        kept = [line["tag"] for line in self._lines("aborted") if line["tag"] in puts]
        require(not kept, f"aborted, and stored: {kept[:5]}")
        for tag, line in planned.items():
            if line["id"] is not None:
                status = self._store.transaction_status(line["id"])
                require((status is hw.TransactionStatus.COMMITTED) == (tag in puts), f"transaction {tag} says it is {status}")

    def _check_order(self) -> None:
        """Events of one origin and key are in the order in which they were given."""
        for name in (IN, SIDE):
            last: dict[tuple[str, Any], int] = {}
            for event, id in zip(self._events[name], self._ids[name], strict=True):
                origin, _, number = id.partition(":")
                require(last.get((origin, event.key), -1) < int(number), f"out of order in {name}: {id} with key {event.key!r}")
                last[origin, event.key] = int(number)
        # What a transaction put into a segment lies there in one piece.
        for name in (IN, SIDE):
            seen: dict[int, str] = {}
            pieces = set[tuple[int, str]]()
            for event, id in zip(self._events[name], self._ids[name], strict=True):
                tag = id.partition(":")[0]
                segment = event.position.segment
                if tag.startswith("tx") and seen.get(segment) != tag:
                    require((segment, tag) not in pieces, f"transaction {tag} is in several pieces in segment {segment} of {name}")
                    pieces.add((segment, tag))
                seen[segment] = tag
        # Copies are in the order of what they are copies of.
        places: dict[Any, list[str]] = defaultdict(list)
        for event, id in zip(self._events[IN], self._ids[IN], strict=True):
            places[event.key].append(id)
        copies: dict[Any, list[str]] = defaultdict(list)
        for event, id in zip(self._events[OUT], self._ids[OUT], strict=True):
            copies[event.key].append(id)
        for key, ids in copies.items():
            require(ids == places[key][: len(ids)], f"the copies with key {key!r} are not a prefix of what was to be copied")

    def _check_cuts(self) -> None:
        """At every moment a transaction was visible in both streams, or in none."""
        planned = {line["tag"]: line["events"] for line in self._lines("planned")}
        for cut in self._cuts:
            seen = Counter[str]()
            for name in (IN, SIDE):
                for event in self._store.stream(name).read(end=cut):
                    if event.value.startswith(b"tx"):
                        seen[event_id(event).partition(":")[0]] += 1
            for tag, count in seen.items():
                require(count == planned[tag], f"{count} of {planned[tag]} events of transaction {tag} were visible")

    def _check_auto_group(self) -> None:
        """What lies before the committed positions was handed out, and first in the order of the stream."""
        first: dict[str, float] = {}
        for line in self._lines("handed"):
            first[line["id"]] = min(line["at"], first.get(line["id"], line["at"]))
        position = self._store.reader_group(AUTO).positions()
        try:
            self._store.stream(IN).ranges(end=position)
        except hw.InvalidRequestError as error:
            raise Broken(f"the group is where no reader can be: {error}") from error
        skipped = [id for event in self._store.stream(IN).read(end=position) if (id := event_id(event)) not in first]
        require(not skipped, f"committed, and never handed out: {skipped[:5]}")
        latest: dict[Any, tuple[float, str]] = {}
        for event, id in zip(self._events[IN], self._ids[IN], strict=True):
            if id in first:
                before = latest.get(event.key, (0.0, ""))
                require(before[0] < first[id], f"{id} was handed out before {before[1]}, with key {event.key!r}")
                latest[event.key] = first[id], id
            else:
                latest[event.key] = float("inf"), id
        for line in self._lines("fenced"):
            require(line["idle"] > PATIENT_SECONDS, f"a reader that lives was fenced: {line['error']}")

    def _check_copies(self, position: hw.Cut) -> None:
        """The copies are those of the events before the positions that were committed with them."""
        copied = Counter(event_id(event) for event in self._store.stream(OUT).read())
        wanted = Counter(event_id(event) for event in self._store.stream(IN).read(end=position))
        require(not copied - wanted, f"copied twice, or without a position: {list(copied - wanted)[:5]}")
        require(not wanted - copied, f"behind the position, and not copied: {list(wanted - copied)[:5]}")

    def _drain(self) -> None:
        """Others take over from the dead, and read to the end."""
        for group in (self._store.reader_group(AUTO), self._store.reader_group(COPY)):
            for dead in group.readers():
                group.remove_reader(dead)
        group, rng = self._store.reader_group(COPY), random.Random(1)
        with group.reader("drain", commit="manual") as reader:
            idle = 0
            while group.lag().events:
                idle = 0 if copy_some(self._store, reader, rng, timeout=0.02) else idle + 1
                require(idle < 100, f"{group.lag().events} events are left that nobody gets, held by {group.assignments()}")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise Broken(message)
