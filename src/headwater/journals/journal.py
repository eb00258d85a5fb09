"""A journal: the events of many entities, each with its own sequence, persisted on conditions, replayed and queried."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headwater.catalog import entities, journals, segments, snapshots
from headwater.catalog.journals import DEAD, READY
from headwater.catalog.segments import SegmentRow
from headwater.errors import InvalidRequestError, NotFoundError, TruncatedError, UnavailableError
from headwater.exports import ExportedWhole
from headwater.journals import index
from headwater.journals.events import Wanted, recorded, without_hidden
from headwater.journals.hidden import HiddenEvents
from headwater.journals.listing import list_ids
from headwater.journals.persisting import Condition, Heads, Persist, Persisted, Refusals
from headwater.journals.queries import Query
from headwater.model.arguments import MOST, check_flag, check_whole, shown
from headwater.model.cuts import Cut
from headwater.model.keys import hash_key
from headwater.model.limits import ENTITY_ID_BYTES, SNAPSHOT_BYTES
from headwater.model.matches import Expected, Match, check_expected, check_matches
from headwater.model.records import Head, Record, Recorded, Snapshot, check_id, check_records, check_tag, check_type, json_text
from headwater.model.segmentmap import SegmentMap
from headwater.segments.batches import Columns, check_columns
from headwater.streams import cuts, lifecycle, reading
from headwater.streams.cuts import Place

if TYPE_CHECKING:
    from headwater.segments.lanes import StreamRef
    from headwater.store import Store
    from headwater.stream import Stream

_PAGE = 1000


class Journal(ExportedWhole):
    """The events of many entities. An entity is named by its id; its events have the sequences 1, 2, 3 and so on. Thread-safe."""

    def __init__(self, store: Store, ref: StreamRef) -> None:
        self._store = store
        self._engine = store._engine
        self._flusher = store._flusher
        self._router = store._router
        self._ref = ref
        self._begin()
        store._journals.add(self)

    def _begin(self) -> None:
        self._heads = Heads(self._look_up_head)
        self._refusals = Refusals(self._engine.deciders)
        self._hidden = HiddenEvents(self._engine, self._ref.id)
        self._rows: list[SegmentRow] = []

    def __repr__(self) -> str:
        return f"<Journal {self._ref.name}>"

    @property
    def name(self) -> str:
        """The full name, `scope/name`."""
        return self._ref.name

    def _read_batches(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The events that are not deleted, with the columns of `Stream.to_arrow`."""
        engine = self._engine
        found = cuts.ranges(engine, self._ref, None, None)
        self._hidden.refresh()
        wanted = Columns(check_columns(self._ref, None))
        batches = (batch.to_arrow(wanted) for batch in reading.read_batches(engine, self._ref, found, wanted.names))
        return wanted.schema_for(self._ref), (without_hidden(batch, self._hidden) for batch in batches)

    # Persisting.

    def persist(
        self,
        id: str,
        events: Record | Sequence[Record],
        *,
        expected: int | Expected | None = None,
        fail_if: Match | Sequence[Match] = (),
        after: Cut | None = None,
    ) -> Persisted:
        """Append events to an entity, durably and all or none.

        With `expected`, ConditionFailedError unless the entity is at that sequence (0: new; `hw.EXISTS`: any but that). With `fail_if`,
        ConditionFailedError if an event that matches was committed after the cut `after`, or ever. The same records given again are
        stored once. UnavailableError if they can't be stored now: they still may be, so give the same records again.
        """
        return self.persist_async(id, events, expected=expected, fail_if=fail_if, after=after).result()

    def persist_async(
        self,
        id: str,
        events: Record | Sequence[Record],
        *,
        expected: int | Expected | None = None,
        fail_if: Match | Sequence[Match] = (),
        after: Cut | None = None,
    ) -> Persist:
        """Like `persist`, without waiting: `result()` of what is returned waits. Many share a commit."""
        id = check_id(id)
        rows = check_records(events)
        found = Persist(self, id, rows, check_expected(expected), self._check_condition(fail_if, after))
        self._store._check_open()
        found.give()
        self._refusals.watch(found)
        return found

    def _check_condition(self, fail_if: Any, after: Any) -> Condition | None:
        matches = check_matches(fail_if) if fail_if != () else ()
        if not matches:
            if after is not None:
                raise InvalidRequestError("`after` is for `fail_if`: say which events may not come after the cut")
            return None
        if after is not None:
            self._check_after(after)
        return Condition(matches, after)

    def _check_after(self, after: Any) -> None:
        """Refuse what is no cut of this journal alone, and a cut before its head."""
        cuts.check_cut(after)
        if len(after.streams) > 1:
            raise InvalidRequestError(f"`after` is a cut of {self.name} alone, not of {', '.join(after.streams)}")
        self._after(after)

    def _after(self, cut: Cut) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], int]:
        """(A cut's numbers by segment, other segments before it, and the number up to which all others lie before it too)."""
        part = cut.streams.get(self.name)
        rows = self._rows
        by_number = {row.number: row for row in rows}
        if part is None or any(number not in by_number or at > by_number[number].tail for number, at in part.segments.items()):
            rows = self._rows = self._engine.run(segments.list_segments, self._ref.id)
            if not rows:
                raise lifecycle.deleted(self._ref)
            by_number = {row.number: row for row in rows}
            self._engine.run(cuts.find_cut, self._engine.store_id, self._ref.id, cut)
        numbers = cuts.cut_numbers(self._engine.store_id, self._ref, rows, cut)
        if any(number not in by_number or at < by_number[number].head for number, at in numbers.items()):
            head = cuts.head(self._engine, self._ref)
            raise TruncatedError(f"the cut in `after` lies before the head of {self.name}: read again, from the head", head)
        floor = min(numbers)
        # Of segments that the cut does not name, those before it never count, whatever their numbers.
        done = [row.number for row in SegmentMap(rows).before(numbers) if row.number > floor]
        return tuple(sorted(numbers.items())), tuple(done), floor

    def _look_up_head(self, id: str) -> int:
        return self._get(id).sequence

    def _keys(self, id: str, count: int) -> pa.Array:
        return pa.array([id.encode()] * count, pa.binary())

    def _tail(self) -> Cut:
        return cuts.tail(self._engine, [self._ref])

    def _get(self, id: str) -> entities.EntityRow:
        """The entity's row. UnavailableError while the index is being built."""
        try:
            row = self._engine.run(entities.get_entity, self._ref.id, id)
        except NotFoundError:
            raise NotFoundError(f"the journal {self.name} was deleted") from None
        self._check_ready(row.state)
        return row

    def _check_ready(self, state: str) -> None:
        if state != READY:
            raise UnavailableError(f"the index of the journal {self.name} is being rebuilt by upkeep: repeat the call")

    def _check_there(self) -> None:
        """UnavailableError while the index is rebuilt, NotFoundError if the journal was deleted."""
        state = self._engine.run(journals.find_state, self._ref.id)
        if state is None or state == DEAD:
            raise NotFoundError(f"the journal {self.name} was deleted")
        self._check_ready(state)

    def _is_ready(self) -> bool:
        return self._engine.run(journals.find_state, self._ref.id) == READY

    # Entities.

    def head(self, id: str) -> Head:
        """Where an entity is; 0, 0, None if it is unknown."""
        row = self._get(check_id(id))
        return Head(row.sequence, row.low, row.snapshot)

    def replay(
        self, id: str, *, after: int = 0, until: int | None = None, limit: int | None = None, reverse: bool = False
    ) -> Iterator[Recorded]:
        """The events of an entity in order, those after a sequence, up to another one; at most `limit`; `reverse`: the last ones first.

        None of an unknown id. Deleted events are left out.
        """
        id = check_id(id)
        check_whole(after, "the sequence in `after`", most=MOST)
        if until is not None:
            check_whole(until, "the sequence in `until`", most=MOST)
        if limit is not None:
            check_whole(limit, "limit", most=MOST)
        return self._replay(id, after + 1, MOST if until is None else until + 1, limit, check_flag(reverse, "reverse"))

    def _replay(self, id: str, first: int, end: int, limit: int | None, reverse: bool) -> Iterator[Recorded]:
        row = self._get(id)
        first, end = max(first, row.low), min(end, row.sequence + 1)
        if limit is not None and reverse:
            first = max(first, end - limit)
        elif limit is not None:
            end = min(end, first + limit)
        if first >= end:
            return
        read = index.entity_runs_reversed if reverse else index.entity_runs
        for found in self._engine.fetch(self._ref, read(self._engine, self._ref.id, id, row, first, end), reverse=reverse):
            yield from reversed(list(recorded(found))) if reverse else recorded(found)

    def ids(self, prefix: str = "", *, after: str | None = None, limit: int | None = None, follow: bool = False) -> Iterator[str]:
        """The ids of the entities that are not deleted, in the order of their bytes, from after an id on; at most `limit`.

        `follow`: each once, and then those that are new, as they come, until the journal is sealed.
        """
        if not isinstance(prefix, str) or "\0" in prefix or (prefix and len(prefix) > ENTITY_ID_BYTES):
            raise InvalidRequestError(f"a prefix is text of up to {ENTITY_ID_BYTES} bytes, not {shown(prefix)}")
        if prefix:
            check_id(prefix, "a prefix")
        if after is not None:
            check_id(after, "the id in `after`")
        if limit is not None:
            check_whole(limit, "limit", most=MOST)
        return list_ids(self, prefix, after, limit, check_flag(follow, "follow"))

    # Queries.

    def events(
        self,
        *,
        id: str | None = None,
        tag: str | None = None,
        type: str | None = None,
        start: Place = None,
        end: Place = None,
        follow: bool = False,
    ) -> Iterator[Recorded]:
        """The events of an entity, with a tag, of a type, or all, between two places as `stream.read` takes them.

        Each entity's events are in order, and no event is missed or given twice, whatever is split, merged or moved meanwhile. `follow`
        goes on at the tail and waits for more.
        """
        return self.query(id=id, tag=tag, type=type, start=start, end=end, follow=follow)

    def query(
        self,
        *,
        id: str | None = None,
        tag: str | None = None,
        type: str | None = None,
        start: Place = None,
        end: Place = None,
        follow: bool = False,
    ) -> Query:
        """The same as an iterator that knows its place: `cut` is where to go on from later."""
        wanted = Wanted(
            None if id is None else check_id(id), None if tag is None else check_tag(tag), None if type is None else check_type(type)
        )
        return Query(self, wanted, start, end, check_flag(follow, "follow"))

    # Snapshots and deletion.

    def snapshot(self, id: str, sequence: int, state: Any, version: int = 1) -> None:
        """Keep an entity's state, a JSON value, as of a sequence that it has."""
        id = check_id(id)
        check_whole(sequence, "a snapshot's sequence", 1, MOST)
        check_whole(version, "a snapshot's version", most=(1 << 31) - 1)
        text = json_text(state, "a snapshot's state")
        size = len(text.encode())
        if size > SNAPSHOT_BYTES:
            raise InvalidRequestError(f"this snapshot has {size:,} bytes; one may have {SNAPSHOT_BYTES:,}")
        self._engine.run(snapshots.put_snapshot, self._ref.id, id, sequence, version, text)

    def find_snapshot(self, id: str, until: int | None = None) -> Snapshot | None:
        """The newest snapshot of an entity, or the newest up to a sequence; None if there is none."""
        id = check_id(id)
        if until is not None:
            check_whole(until, "the sequence in `until`", most=MOST)
        found = self._engine.run(snapshots.find_snapshot, self._ref.id, id, MOST if until is None else until)
        return None if found is None else Snapshot(found[0], json.loads(found[2]), found[1])

    def delete_snapshots(self, id: str, until: int | None = None) -> None:
        """Forget an entity's snapshots, or those up to a sequence."""
        id = check_id(id)
        if until is not None:
            check_whole(until, "the sequence in `until`", most=MOST)
        self._engine.run(snapshots.delete_snapshots, self._ref.id, id, MOST if until is None else until)

    def delete_to(self, id: str, sequence: int) -> None:
        """Hide an entity's events up to a sequence from replay and queries, and forget the snapshots before it. Sequences go on."""
        self._delete(check_id(id), check_whole(sequence, "the sequence to delete to", most=MOST))

    def delete(self, id: str) -> None:
        """Hide all events of an entity, and forget its snapshots. Its next event has the next sequence; an unknown id stays so."""
        self._delete(check_id(id), None)

    def _delete(self, id: str, sequence: int | None) -> None:
        self._get(id)
        self._engine.run(entities.delete_events, self._ref.id, id, hash_key(id.encode()), sequence)

    # The stream.

    @property
    def stream(self) -> Stream:
        """The journal as a stream, to be read, split, merged, forked or sealed."""
        return self._store.stream(self.name)
