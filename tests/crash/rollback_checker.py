"""What must be true of a store after a history of `rollback_workers`, whoever was killed when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import headwater as hw
from headwater.check import check_store
from tests.crash.checker import Broken, require
from tests.crash.history_workers import event_id, read_log
from tests.crash.rollback_workers import GROUP, KEPT, ROLES, STREAM, TABLE, digest

#: The lines that a history has some of, if enough happened in it. A roll-back that finds its cut undone is `stale`: not in every history.
LOGGED = ("acked", "handed", "rolled", "cut", "forking", "tagging", "told", "scaled", "tiered")

#: Places of events, by segment and number: a roll-back moves segments with their numbers, so they mean the same in all streams.
Places = dict[tuple[int, int], str]


def has_all(folder: Path) -> bool:
    """Whether each kind of line was logged by now."""
    return {line["what"] for role in ROLES for line in read_log(folder, role)} >= set(LOGGED)


class RollBackChecker:
    """Looks at a store whose processes are all gone. Each check raises Broken with what it found."""

    def __init__(self, store: hw.Store, folder: Path) -> None:
        self._store = store
        self._stream = store.stream(STREAM)
        self._logs = {role: read_log(folder, role) for role in ROLES}
        self._events = {name: list(store.stream(name).read()) for name in store.streams()}
        self._places: dict[str, Places] = {
            name: {(event.position.segment, event.position.number): event_id(event) for event in events}
            for name, events in self._events.items()
        }
        # In their order: one process at a time rolls back.
        self._done = [line for line in self._lines("rolling") if line["kept"] in self._events]

    def check(self) -> dict[str, int]:
        """Check everything; returns how much there was of it."""
        for line in self._lines("failed"):
            raise Broken(f"a process failed: {line['error']}")
        self._check_places()
        self._check_acked()
        self._check_order()
        self._check_roll_backs()
        self._check_cuts()
        self._check_forks_and_tags()
        self._check_group()
        self._check_watcher()
        report = check_store(self._store)
        require(report.ok, f"the store is damaged: {report.problems[:3]}")
        counts = {what: len(self._lines(what)) for what in (*LOGGED, "stale")}
        return counts | {"events": len(self._places[STREAM]), "kept": len(self._done)}

    def _lines(self, what: str) -> list[dict[str, Any]]:
        return [line for lines in self._logs.values() for line in lines if line["what"] == what]

    def _check_places(self) -> None:
        """No place ever means two events, and no event is at two places."""
        seen: Places = {}
        where: dict[str, tuple[int, int]] = {}
        watched = [((segment, number), id) for line in self._lines("watched") for segment, number, id in line["seen"]]
        logged = [((line["place"][0], line["place"][1]), line["id"]) for what in ("acked", "handed") for line in self._lines(what)]
        for place, id in [*watched, *logged, *(item for places in self._places.values() for item in places.items())]:
            require(seen.setdefault(place, id) == id, f"place {place} means {seen[place]} and {id}")
            require(where.setdefault(id, place) == place, f"{id} is at {where[id]} and at {place}")

    def _check_acked(self) -> None:
        stored = {id for name, places in self._places.items() if name == STREAM or name.startswith(KEPT) for id in places.values()}
        lost = [line["id"] for line in self._lines("acked") if line["id"] not in stored]
        require(not lost, f"acked, and neither in the stream nor in what was kept: {lost[:5]}")

    def _check_order(self) -> None:
        for name, events in self._events.items():
            last: dict[tuple[str, Any], int] = {}
            for event in events:
                origin, _, number = event_id(event).partition(":")
                require(last.get((origin, event.key), -1) < int(number), f"out of order in {name}: {origin}:{number}")
                last[origin, event.key] = int(number)

    def _check_roll_backs(self) -> None:
        """Each left what lay before its cut, and nothing of what lay past it ever came back."""
        puts = dict(self._store.table(TABLE).items())
        done = [line["kept"] for line in self._done]
        require(set(puts) <= set(done), "a put was stored without the roll-back of its transaction")
        missing = [line["kept"] for line in self._lines("rolled") if line["kept"] not in done]
        require(not missing, f"rolled back, and nothing is kept: {missing[:3]}")
        for line, after in zip(self._done, [*done[1:], STREAM], strict=True):
            kept = self._store.stream(line["kept"])
            [part] = hw.Cut.parse(line["cut"]).streams.values()
            cut = hw.Cut(self._store.id, {kept.name: part._replace(id=kept.id)})
            before = {event_id(event) for event in kept.read(end=cut)}
            whole, then = set(self._places[kept.name].values()), set(self._places[after].values())
            require(before <= then, f"before the cut, and gone with {kept.name}: {sorted(before - then)[:5]}")
            require(not (whole - before) & then, f"past the cut of {kept.name}, and still there: {sorted((whole - before) & then)[:5]}")
            require(kept.is_sealed, f"{kept.name} is not sealed")

    def _check_cuts(self) -> None:
        """A cut of some moment means what it meant then, or is refused with a place before it that is left."""
        for line in self._lines("cut"):
            try:
                found = digest(event_id(event) for event in self._stream.read(end=hw.Cut.parse(line["cut"])))
            except hw.RolledBackError as error:
                require(error.cut is not None, "a RolledBackError has no cut")
                left = [event_id(event) for event in self._stream.read(end=error.cut)]
                require(len(left) <= int(line["digest"].split()[0]), f"the cut of the error lies past the cut {line['cut']}")
            except hw.HeadwaterError as error:
                raise Broken(f"a cut that was undone is refused as another one: {error!r}") from error
            else:
                require(found == line["digest"], f"the cut {line['cut']} had {line['digest']}, and has {found}")

    def _check_forks_and_tags(self) -> None:
        for line in self._lines("forking"):
            if line["name"] in self._events:
                require(digest(self._places[line["name"]].values()) == line["digest"], f"the fork {line['name']} is not what it was")
        tags = self._store.tags()
        for line in self._lines("tagging"):
            if line["name"] in tags:
                found = digest(event_id(event) for event in self._stream.read(end=tags[line["name"]]))
                require(found == line["digest"], f"the tag {line['name']} had {line['digest']}, and has {found}")

    def _check_group(self) -> None:
        """What lies before the committed positions was handed out."""
        handed = {line["id"] for line in self._lines("handed")}
        position = self._store.reader_group(GROUP).positions()
        try:
            skipped = [id for event in self._stream.read(end=position) if (id := event_id(event)) not in handed]
        except hw.HeadwaterError as error:
            raise Broken(f"the group is where no reader can be: {error}") from error
        require(not skipped, f"committed, and never handed out: {skipped[:5]}")

    def _check_watcher(self) -> None:
        """A follower that did as each error said has seen what is there: it skipped nothing, and kept nothing that was undone."""
        [line] = self._lines("watched")
        seen = {(segment, number): id for segment, number, id in line["seen"]}
        left = self._places[STREAM]
        require(not left.keys() - seen.keys(), f"there, and not seen by the follower: {sorted(left.keys() - seen.keys())[:5]}")
        require(not seen.keys() - left.keys(), f"seen by the follower, and undone unsaid: {sorted(seen.keys() - left.keys())[:5]}")
