"""What must be true of a journal whose changes are over, found by reading it as a plain stream and its index as rows.

Nothing of the journal's own readers is used to find what there is: they are compared with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import headwater as hw


class Broken(AssertionError):
    """A promise was broken."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise Broken(message)


@dataclass(frozen=True)
class Stored:
    """An event as the stream has it."""

    id: str
    sequence: int
    type: str
    data: str
    tags: tuple[str, ...]
    event_id: str
    position: hw.Position


def stored_events(store: hw.Store, name: str) -> list[Stored]:
    """All events of a journal, deleted ones too, in the order of its stream."""
    found = []
    for event in store.stream(name).read():
        row: Any = event.value
        found.append(Stored(row["id"], row["sequence"], row["type"], row["data"], tuple(row["tags"]), row["event_id"], event.position))
    return found


def check_journal(store: hw.Store, name: str, *, lows: Mapping[str, int] | None = None) -> list[Stored]:
    """Compare the stream with the index and with queries; returns the stream's events. `lows` are the first sequences left by deletions."""
    events = stored_events(store, name)
    journal = store.journal(name)
    lows = lows or {}
    entities: dict[str, list[Stored]] = defaultdict(list)
    for event in events:
        entities[event.id].append(event)
    _check_sequences(entities, events)
    _check_index(store, name, entities, events)
    for id in _some(entities):
        mine = entities[id]
        wanted = [(event.sequence, event.event_id) for event in mine if event.sequence >= lows.get(id, 1)]
        _same(journal.replay(id), wanted, f"replay of {id}")
        _same(journal.replay(id, reverse=True), wanted[::-1], f"reversed replay of {id}")
        _same(journal.events(id=id), wanted, f"query of {id}")
        require(journal.head(id).sequence == len(mine), f"{id} is at {journal.head(id)}, and has {len(mine)} events")
    left = [event for event in events if event.sequence >= lows.get(event.id, 1)]
    _check_query(journal.events(), left, "all events")
    for tag in _some({tag for event in events for tag in event.tags}):
        _check_query(journal.events(tag=tag), [event for event in left if tag in event.tags], f"tag {tag}")
    for type in _some({event.type for event in events}):
        _check_query(journal.events(type=type), [event for event in left if event.type == type], f"type {type}")
    return events


def _some(words: Iterable[str]) -> list[str]:
    """Up to 40 words, spread over all. The rows of all are compared anyway."""
    found = sorted(words)
    return found[:: len(found) // 40 + 1]


def _check_sequences(entities: Mapping[str, list[Stored]], events: list[Stored]) -> None:
    for id, mine in entities.items():
        numbers = [event.sequence for event in mine]
        require(numbers == list(range(1, len(numbers) + 1)), f"{id} has the sequences {numbers}")
        segments = [event.position.segment for event in mine]
        require(segments == sorted(segments), f"{id} goes back to an earlier segment: {segments}")
    ids = [event.event_id for event in events]
    require(len(ids) == len(set(ids)), "an event is stored twice")


def _same(found: Iterable[hw.Recorded], wanted: list[tuple[int, str]], what: str) -> None:
    got = [(event.sequence, str(event.event_id)) for event in found]
    require(got == wanted, f"{what} gives {[one for one, _ in got]}, not {[one for one, _ in wanted]}")


def _check_query(found: Iterable[hw.Recorded], wanted: list[Stored], what: str) -> None:
    """A query gives each event once, those of an entity, and those of a segment, in order."""
    got = [(event.position, event.id, event.sequence) for event in found]
    missed = {(event.position, event.id, event.sequence) for event in wanted}.symmetric_difference(got)
    require(
        not missed and len(got) == len(wanted), f"{what}: missed, made up or repeated are {sorted(missed)[:5]}, {len(got)} of {len(wanted)}"
    )
    check_order(got, what)


def check_order(got: Iterable[tuple[hw.Position, str, int]], what: str) -> None:
    """Events of one entity come with rising sequences, those of one segment with rising numbers."""
    last: dict[tuple[str, object], int] = {}
    for position, id, sequence in got:
        for key, at in ((("entity", id), sequence), (("segment", position.segment), position.number)):
            require(last.get(key, -1) < at, f"{what}: {key} goes from {last.get(key)} to {at}")
            last[key] = at


# The index.


def _check_index(store: hw.Store, name: str, entities: Mapping[str, list[Stored]], events: list[Stored]) -> None:
    query = store._engine.database.query
    stream = store.journal(name)._ref.id
    rows = {row[0]: row[1:] for row in query("SELECT id, sequence, segment, number, paged, recent FROM entity WHERE stream = ?", (stream,))}
    require(rows.keys() == entities.keys(), f"the index has other entities: {sorted(rows.keys() ^ entities.keys())[:5]}")
    pages = _pages(query("SELECT id, first, numbers FROM entity_page WHERE stream = ? ORDER BY id, first", (stream,)))
    for id, mine in entities.items():
        sequence, segment, number, paged, recent = rows[id]
        last = mine[-1].position
        require(
            (sequence, segment, number) == (len(mine), *last), f"the index has {id} at {sequence} in {segment}:{number}, it is at {last}"
        )
        for first, text in pages.get(id, []):
            where = _places(text)
            require(
                where == [event.position for event in mine[first - 1 : first - 1 + len(where)]], f"the page of {id} at {first} is wrong"
            )
        for (first, text), (after, _) in pairwise([*pages.get(id, []), (paged + 1, "")]):
            require(first + len(_places(text)) == after, f"between the pages of {id} at {first} and {after} is a gap")
        require(_places(recent) == [event.position for event in mine[paged:]], f"the newest numbers of {id} are wrong")
    words: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for event in events:
        for kind, word in ((1, event.type), *((0, tag) for tag in event.tags)):
            words[kind, word, event.position.segment].append(event.position.number)
    found = {
        tuple(row[:3]): row[3:] for row in query("SELECT kind, word, segment, number, count, recent FROM word WHERE stream = ?", (stream,))
    }
    require(found.keys() == words.keys(), f"the index has other words: {sorted(found.keys() ^ words.keys())[:5]}")
    tagged: dict[tuple[str, int], list[int]] = defaultdict(list)
    for word, segment, _, text in query("SELECT word, segment, first, numbers FROM word_page WHERE stream = ? ORDER BY 1, 2, 3", (stream,)):
        tagged[word, segment] += [place.number for place in _places(text)]
    for (kind, word, segment), numbers in words.items():
        last_number, count, recent = found[kind, word, segment]
        require((last_number, count) == (numbers[-1], len(numbers)), f"{word} in {segment} is at {last_number}, {count}: {numbers[-5:]}")
        if kind == 0:
            indexed = tagged[word, segment] + [place.number for place in _places(recent)]
            require(indexed == numbers, f"the index of {word} in {segment} has {indexed[-9:]}, the stream {numbers[-9:]}")


def _pages(rows: Iterable[Any]) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for id, first, text in rows:
        found[id].append((first, text))
    return found


def _places(text: str) -> list[hw.Position]:
    """The positions in a text of the index: `2:17x3,5` are 17, 18, 19 and 25 of segment 2."""
    found: list[hw.Position] = []
    segment = number = 0
    for token in filter(None, text.split(",")):
        start, _, count = token.partition("x")
        if ":" in start:
            segment, number = map(int, start.split(":"))
        else:
            number += int(start)
        found += [hw.Position(segment, number + place) for place in range(int(count or 1))]
        number += int(count or 1)
    return found
