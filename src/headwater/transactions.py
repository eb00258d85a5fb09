"""Transactions: writes to many streams and tables, with readers' positions, that become visible in one commit or not at all."""

from __future__ import annotations

import os
import re
import threading
import time as clock
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headwater.catalog import streams, transactions
from headwater.catalog.positions import Moves
from headwater.committing import CommitRequest
from headwater.contents import Contents, TableChange, new_batch_id
from headwater.errors import (
    HeadwaterError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    TransactionEndedError,
    UnavailableError,
)
from headwater.frames import to_batch
from headwater.journals.journal import Journal
from headwater.model.arguments import MOST, check_flag, check_whole, items_of, shown
from headwater.model.cuts import Cut, StreamCut
from headwater.model.limits import ADOPTED_TRANSACTIONS, MARKER_OWNER_BYTES
from headwater.model.markers import Marker
from headwater.model.matches import Expected, Match, check_expected
from headwater.model.names import parse_stream_name
from headwater.model.records import Record, check_records
from headwater.model.records import check_id as check_id_of_entity
from headwater.readers.reader import Reader
from headwater.runtime import failpoints
from headwater.segments.engine import Engine
from headwater.segments.routing import Router
from headwater.streams.cuts import check_cut
from headwater.streams.replacing import CONTINUE, REREAD
from headwater.synchronizer import Synchronizer
from headwater.tables import check_entry, check_key

if TYPE_CHECKING:
    from headwater.store import Store

T = TypeVar("T")


class TransactionStatus(Enum):
    """Where a transaction is. One that was committed or aborted stays so."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


_BATCH = re.compile(r"[0-9a-f]{1,15}|[0-7][0-9a-f]{15}")
#: Its look-up in the class is a good part of what a small event costs.
_OPEN = TransactionStatus.OPEN


class TransactionInfo(NamedTuple):
    """A transaction as `store.transactions` lists it: `streams` are those it staged something for, or wrote to."""

    id: str
    status: TransactionStatus
    begun: datetime
    expires: datetime
    ended: datetime | None
    streams: tuple[str, ...]
    marker: Marker | None = None


class Commit(NamedTuple):
    """A commit: the place in each stream right behind it. `repeated` if its marker was committed before: nothing was stored again."""

    id: str
    cut: Cut
    repeated: bool


class Transaction:
    """Writes that commit together. Use it in a `with` block: it commits at the end, and aborts on an exception.

    Nothing is visible before the commit. While the handle is open its lease is renewed; when the process dies, it times out.
    Thread-safe; other processes add to it with `store.resume_transaction(id)`.
    """

    def __init__(
        self, store: Store, router: Router, *, lease: float, auto_renew: bool, marker: Marker | None, resumed: str | None, staged: int = 0
    ) -> None:
        self._store = store
        self._engine: Engine = store._engine
        self._committer = store._committer
        self._contents = Contents(self._engine, router)
        self._journals: dict[str, Journal] = {}
        self._id = resumed or uuid.uuid4().hex
        self._lease_seconds = lease
        self._auto_renew = auto_renew
        self._marker = marker
        self._is_begun = resumed is not None
        self._contents.may_remember = not self._is_begun
        self._is_asked = False
        self._made_at = clock.monotonic()
        self._status = TransactionStatus.OPEN
        self._commit: Commit | None = None
        # With what was given so far, this says which call of commit it was: its answer may be lost, and more given.
        self._caller = uuid.uuid4().hex
        self._given = 0
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._readers: list[tuple[Reader, Moves]] = []
        #: What is being staged.
        self._pending: Contents | None = None
        #: The last batch that this handle staged, or that the one staged whose receipt it has.
        self._staged = staged
        if self._is_begun and auto_renew:
            store._heart.add(self._renew_quietly, lease / 3)

    def __repr__(self) -> str:
        return f"<Transaction {self._id} {self._status.value}>"

    @property
    def id(self) -> str:
        """The id by which any process can resume it or ask for its status."""
        with self._lock:
            if self._status is TransactionStatus.OPEN:
                self._begin()
            elif not self._is_begun and not self._is_asked and not self._engine.is_closed:
                # It ended before the catalog knew of it. Whoever asks for its id may ask what became of it.
                self._engine.run(transactions.abort, self._id, self._lease_us)
                self._is_asked = True
            return self._id

    @property
    def receipt(self) -> str:
        """The id with what this handle staged last, after `flush`: who adopts or resumes by it misses nothing of that.

        A fail-over of PostgreSQL may lose the last commits. Then a receipt is refused, where an id takes what is left.
        """
        with self._lock:
            return f"{self.id}-{self._staged:x}"

    @property
    def status(self) -> TransactionStatus:
        """OPEN, COMMITTED or ABORTED, as the store knows it."""
        if self._status is not TransactionStatus.OPEN:
            return self._status
        if self._is_too_old:
            return TransactionStatus.ABORTED
        if not self._is_begun and not self._is_asked:
            return TransactionStatus.OPEN
        try:
            return self._store.transaction_status(self._id)
        except NotFoundError:
            return TransactionStatus.OPEN  # A commit was tried, and never reached the catalog.

    def _begin(self) -> None:
        """Make the transaction known to the catalog. A short one never is before its commit: that saves it a round trip."""
        if not self._is_begun:
            self._check_age()
            self._contents.look_up()
            self._contents.may_remember = False
            self._engine.run(transactions.begin, self._id, self._lease_us, self._marker)
            self._is_begun = True
            failpoints.reach("txn.begun")
            if self._auto_renew:
                self._store._heart.add(self._renew_quietly, self._lease_seconds / 3)

    @property
    def _lease_us(self) -> int:
        return max(1, int(self._lease_seconds * 1_000_000))

    @property
    def _is_too_old(self) -> bool:
        """Whether the lease ran out before the catalog knew of the transaction; never, if the handle renews it."""
        return not self._is_begun and not self._auto_renew and clock.monotonic() - self._made_at > self._lease_seconds

    def _check_age(self) -> None:
        if self._is_too_old:
            self._end(TransactionStatus.ABORTED)
            raise TransactionEndedError(f"transaction {self._id} was aborted: its lease ran out")

    # Writing.

    def write(
        self, stream: str, value: bytes | str | Mapping[str, Any], key: bytes | str | int | None = None, *, time: datetime | None = None
    ) -> None:
        """Add an event. It is checked now, and visible after the commit."""
        with self._lock:
            if self._status is not _OPEN or self._contents.room <= 0:
                self._make_room()
            self._contents.write(stream, value, key, time)
            self._given += 1

    def write_batch(self, stream: str, frame: Any, key: str | None = None, *, missing: str | None = None) -> None:
        """Add the rows of a frame, as `Writer.write_batch` takes it; `key` names the column with the routing keys."""
        batch = to_batch(frame)
        with self._lock:
            self._make_room()
            self._given += self._contents.write_batch(stream, batch, key, missing)

    def put(self, table: str, key: str, value: bytes, version: int | None = None) -> None:
        """Set a table's entry, at the commit; with `version`, only if it has that one then (`hw.ABSENT`: only if it is missing)."""
        check_entry(key, value, version)
        self._change_table(table, TableChange(key, value, version))

    def remove(self, table: str, key: str, version: int | None = None) -> None:
        """Remove a table's entry, at the commit."""
        check_key(key, version)
        self._change_table(table, TableChange(key, None, version))

    def require(self, table: str, key: str, version: int) -> None:
        """Commit only if a table's entry has this version then (`hw.ABSENT`: is missing). Nothing is changed by that.

        Of two transactions that each require what the other one changes, one commits and the other raises ConditionFailedError.
        """
        if version is None:
            raise InvalidRequestError("require takes the version that the entry must have, or hw.ABSENT")
        check_key(key, version)
        with self._lock:
            self._make_room()
            self._contents.require_entry(table, key, version)
            self._given += 1

    def roll_back(self, name: str, to: Cut | int, *, keep_as: str | None = None, force: bool = False) -> None:
        """Roll a stream back to a cut at the commit, as `Stream.roll_back` does, or a table to a version, as `Table.roll_back` does.

        The transaction does not write to a stream that it rolls back. Nobody else may change a table between this call and the commit.
        """
        check_flag(force, "force")
        if isinstance(to, Cut):
            name_kept = str(parse_stream_name(keep_as))  # type: ignore[arg-type]  # None is refused there
        elif keep_as is not None:
            raise InvalidRequestError("a table keeps its history: roll it back without `keep_as`")
        with self._lock:
            self._make_room()
            if isinstance(to, Cut):
                self._begin()
                self._contents.roll_back(name, to, name_kept, force, self._id)
            elif isinstance(to, int) and not isinstance(to, bool):
                check_whole(to, "a table's version", most=MOST)
                self._contents.roll_table_back(name, to)
            else:
                check_cut(to)
            self._given += 1

    def replace_stream(self, name: str, *, by: str, keep_as: str, consumers: str = "reread") -> None:
        """Give the name of a stream to another one at the commit, as `Store.replace_stream` does. The transaction writes to neither."""
        kept = str(parse_stream_name(keep_as))
        if consumers not in (REREAD, CONTINUE):
            raise InvalidRequestError(f"consumers 'reread' or 'continue', not {shown(consumers)}")
        with self._lock:
            self._make_room()
            self._begin()
            self._contents.replace_stream(name, by, kept, consumers)
            self._given += 1

    def _change_table(self, table: str, change: TableChange) -> None:
        with self._lock:
            self._make_room()
            self._contents.change_table(table, change)
            self._given += 1

    def persist(
        self,
        journal: str,
        id: str,
        events: Record | Sequence[Record],
        *,
        expected: int | Expected | None = None,
        fail_if: Match | Sequence[Match] = (),
        after: Cut | None = None,
    ) -> None:
        """Append events to an entity of a journal, at the commit, on the same conditions as `Journal.persist`.

        Without `expected`, the entity must then be at the sequence that it has now. The same records given again are not recognised.
        """
        id = check_id_of_entity(id)
        rows = check_records(events)
        expected = check_expected(expected)
        with self._lock:
            self._make_room()
            found = self._journal(journal)
            self._contents.persist(found, id, rows, expected, found._check_condition(fail_if, after))
            self._given += 1

    def require_entity(self, journal: str, id: str, expected: int | Expected) -> None:
        """Commit only if an entity is at a sequence then (0: unknown), or exists (`hw.EXISTS`). It need not be one that is persisted."""
        id = check_id_of_entity(id)
        checked = check_expected(expected)
        if checked is None:
            raise InvalidRequestError("require_entity takes the sequence that the entity must be at, or hw.EXISTS")
        with self._lock:
            self._make_room()
            self._contents.require(self._journal(journal), id, checked)
            self._given += 1

    def _journal(self, name: str) -> Journal:
        """Return the journal of a name, which is looked up once for each transaction."""
        name = str(parse_stream_name(name))
        if name not in self._journals:
            self._journals[name] = self._store._open_journal(name)
        return self._journals[name]

    def update(self, synchronizer: Synchronizer[Any, Any], updates: Sequence[Any]) -> None:
        """Apply updates to shared state, at the commit, if nobody changed it since this process last fetched it."""
        with self._lock:
            self._check_open()
            if not isinstance(synchronizer, Synchronizer):
                raise InvalidRequestError(f"a transaction updates what store.synchronizer() returned, not {shown(synchronizer)}")
            self._contents.update(*synchronizer.stage(self._engine.store_id, updates))
            self._given += 1

    def adopt(self, ids: Sequence[str]) -> None:
        """Take over what other open transactions staged, in this order, after what this one has so far. They end; this one commits it.

        For work that is staged in parallel, where only some of the attempts shall count. Each is named by its `receipt`, or by its id.
        TransactionEndedError if one ended before, or if the store lost a part of what a receipt is for.
        """
        others = [parse_receipt(id) for id in items_of(ids, "what is taken over", "transactions' receipts")]
        if self._id in [id for id, _ in others]:
            raise InvalidRequestError(f"transaction {self._id} can't take over itself")
        if len(others) > ADOPTED_TRANSACTIONS:
            raise InvalidRequestError(f"a call takes over up to {ADOPTED_TRANSACTIONS:,} transactions, not {len(others):,}: make several")
        with self._lock:
            self.flush()
            if others:
                self._given += 1
                batch = new_batch_id()
                self._ended_on(lambda: self._engine.run(transactions.adopt, self._id, others, batch, self._staged))
                self._staged = batch
                failpoints.reach("adopt.committed")

    def commit_reader(self, reader: Reader) -> None:
        """Commit a manual reader's position as of now together with the rest; an abort takes the reader back to its last durable one."""
        with self._lock:
            self._check_open()
            if not isinstance(reader, Reader):
                raise InvalidRequestError(f"a transaction commits the position of what group.reader() returned, not of {shown(reader)}")
            earlier = next((moves for other, moves in self._readers if other is reader), {})
            change, moves = reader.stage_positions(self._engine.store_id, earlier)
            self._readers = [item for item in self._readers if item[0] is not reader]
            self._readers.append((reader, moves))
            self._contents.move_reader(change)
            self._given += 1

    def _check_open(self) -> None:
        if self._status is not TransactionStatus.OPEN:
            raise TransactionEndedError(f"transaction {self._id} is {self._status.value} already")

    def _make_room(self) -> None:
        """Stage what is there if it is much. Before something is added, so that a failure adds nothing."""
        self._check_open()
        if self._contents.room <= 0:
            self.flush()

    # Staging.

    def flush(self) -> None:
        """Stage what was given so far: durable, still invisible. A process that only adds to a transaction ends with this."""
        with self._lock:
            self._check_open()
            self._begin()
            self._stage_pending()
            if not self._contents.is_empty:
                contents, emptied = self._contents, self._contents.emptied()
                # In one line without a call, in which a Ctrl-C can't come: what was given is always in one of them.
                self._contents, self._pending = emptied, contents
                try:
                    self._stage_pending()
                except TransactionEndedError:
                    if self._status is TransactionStatus.OPEN:
                        # A commit of it is under way, and was given these contents: the next call of commit gives them again.
                        self._contents, self._pending = contents, None
                    raise

    def _stage_pending(self) -> None:
        """Stage what was begun to be staged. Its answer may have been lost: it is the same batch, so it is added once."""
        if self._pending is not None:
            contents = self._pending
            self._ended_on(lambda: self._committer.stage(self._id, contents, self._staged))
            self._pending, self._staged = None, contents.id

    def _ended_on(self, call: Callable[[], T]) -> T:
        """Run a call to the catalog; if it says that the transaction ended, so does this handle."""
        try:
            return call()
        except TransactionEndedError as error:
            if error.facts.get("id", self._id) != self._id:
                raise  # Another one, which this one was to adopt.
            if error.facts.get("state") == transactions.COMMITTING:
                raise  # A commit of it is under way, or failed half-way: commit again, and it is told how that ended.
            if error.facts.get("state") == transactions.COMMITTED:
                self._end(TransactionStatus.COMMITTED, is_whole=not self._contents.readers)
            else:
                self._end(TransactionStatus.ABORTED)
            raise

    # The end.

    def renew(self) -> None:
        """Put the time-out off by another lease. TransactionEndedError if it ended already."""
        with self._lock:
            self._check_open()
            self._begin()
        self._ended_on(lambda: self._engine.run(transactions.renew, self._id))

    def _renew_quietly(self) -> bool:
        """For the heart: whether to go on. A failure shows at the next call that matters."""
        if self._status is not TransactionStatus.OPEN or self._engine.is_closed:
            return False
        try:
            self._engine.run(transactions.renew, self._id)
        except (UnavailableError, OutcomeUnknownError):
            return True
        except HeadwaterError:
            return False
        return True

    def commit(self) -> Commit:
        """Make everything visible at once. Durable on return; on a handle that is committed, the same answer again.

        A condition that does not hold, a fenced reader or a sealed stream abort the transaction and raise; nothing was stored.
        UnavailableError leaves it open: commit again.
        """
        with self._lock:
            if self._commit is not None:
                return self._commit
            self._check_open()
            try:
                self._stage_pending()
                self._check_age()
                self._is_asked = True
                request = CommitRequest(
                    self._marker, self._lease_us, f"{self._caller}.{self._given}", self._staged if self._is_begun else None
                )
                outcome = self._ended_on(lambda: self._committer.commit(self._id, self._contents, request))
            except (UnavailableError, OutcomeUnknownError):
                raise
            except HeadwaterError:
                self._abort_quietly()
                raise
            failpoints.reach("txn.committed")
            self._commit = Commit(outcome.id, self._cut(outcome.tails), outcome.repeated)
            # What an earlier commit under the same marker stored are not these positions.
            self._end(TransactionStatus.COMMITTED, is_whole=not outcome.repeated)
            return self._commit

    def _cut(self, tails: dict[int, dict[int, int]]) -> Cut:
        names = self._contents.names
        parts = {}
        for stream, numbers in tails.items():
            try:
                name = names.get(stream) or self._engine.run(streams.get_stream, stream).full_name
            except NotFoundError:
                continue  # An earlier commit is told again, and this stream of it was deleted since.
            parts[name] = StreamCut(stream, numbers)
        return Cut(self._engine.store_id, parts)

    def abort(self) -> None:
        """Drop everything. Aborting again does nothing; a committed one raises TransactionEndedError."""
        with self._lock:
            if self._status is TransactionStatus.ABORTED:
                return
            self._check_open()
            if self._is_begun or self._is_asked:
                self._ended_on(lambda: self._engine.run(transactions.abort, self._id, self._lease_us))
                failpoints.reach("txn.aborted")
            self._end(TransactionStatus.ABORTED)

    def _abort_quietly(self) -> None:
        if self._status is TransactionStatus.OPEN:
            try:
                self.abort()
            except HeadwaterError:
                if self._status is TransactionStatus.OPEN:
                    self._end(TransactionStatus.ABORTED)

    def _end(self, status: TransactionStatus, *, is_whole: bool = False) -> None:
        """`is_whole`: what this handle was given is committed, its readers' positions with it; else they go back."""
        self._status = status
        self._contents, self._pending = self._contents.emptied(), None
        for reader, moves in self._readers:
            if is_whole:
                reader.positions_committed(moves)
            else:
                reader.rewind()
        self._readers.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # A child that was forked in the block does not end it: the transaction is the parent's, who goes on with it.
        if self._status is not TransactionStatus.OPEN or self._process != os.getpid():
            return
        if error is None:
            self.commit()
        else:
            self._abort_quietly()


def parse_receipt(receipt: Any) -> tuple[str, int]:
    """(the id, the batch that was staged last, 0 if it is not known) of a receipt or an id."""
    id, _, batch = receipt.partition("-") if isinstance(receipt, str) else (receipt, "", "")
    if batch and not _BATCH.fullmatch(batch):
        raise InvalidRequestError(f"a transaction is named by its receipt or its id, not {shown(receipt)}")
    return check_id(id), int(batch or "0", 16)


def check_id(id: Any) -> str:
    """A transaction's id itself, if it can be one."""
    if not isinstance(id, str) or not id.isalnum() or not id.isascii():
        raise InvalidRequestError(f"a transaction is named by the text of its id, not {shown(id)}")
    return id


def check_marker(marker: Any) -> None:
    """Refuse what is no marker, before anything is staged under it."""
    if not isinstance(marker, Marker):
        raise InvalidRequestError(f"a marker is hw.Marker(owner, sequence), not {shown(marker)}")
    check_owner(marker.owner)
    if marker.fingerprint is not None:
        _check_printable(marker.fingerprint)
    check_whole(marker.sequence, "a marker's sequence", -MOST, MOST)


def check_owner(owner: Any) -> None:
    """Refuse what can't own a marker."""
    _check_printable(owner)
    if len(owner.encode()) > MARKER_OWNER_BYTES:
        raise InvalidRequestError(f"a marker's owner has up to {MARKER_OWNER_BYTES:,} bytes; this one has {len(owner.encode()):,}")


def _check_printable(text: Any) -> None:
    if not isinstance(text, str) or not text or not text.isprintable():
        raise InvalidRequestError(f"a marker's owner and fingerprint are text that can be printed, not {shown(text)}")
