"""A catalog that forgot its last commits, as after a fail-over to a standby that lagged, while processes begun by them live on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.catalog import sessions
from headwater.catalog.database import Tx
from headwater.catalog.schema import SCHEMA, next_id
from headwater.errors import FencedError, InvalidRequestError, NotFoundError, TransactionEndedError
from headwater.ingest import ingest
from headwater.ingest.spread import FileTask, StagedFile
from headwater.model.limits import INLINE_BYTES
from headwater.spark.options import read_sink_options
from headwater.spark.pieces import Piece as SparkPiece
from headwater.spark.pieces import Staged
from headwater.spark.staging import gather
from tests.crash.processes import Place, wait_until

Remember = Callable[[], Callable[..., None]]
TABLES = [words[2] for words in map(str.split, SCHEMA.statements("schema.sql", "sqlite")) if words[:2] == ["CREATE", "TABLE"]]


@pytest.fixture
def remember(store: hw.Store) -> Remember:
    """Keep the catalog as it is now; what it returns makes the catalog forget all that was committed since."""
    store.create_stream("a/x")
    database = store._engine.database
    on_postgres = hasattr(database, "connect")

    def remember() -> Callable[..., None]:
        kept: dict[str, list[Any]] = {table: database.query(f"SELECT * FROM {table}") for table in TABLES}

        def work(tx: Tx) -> None:
            tx.run("SET LOCAL session_replication_role = replica" if on_postgres else "PRAGMA defer_foreign_keys = on")
            for table, rows in kept.items():
                tx.run(f"DELETE FROM {table}")
                for row in rows:
                    tx.run(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

        def forget(seconds: float = 0.02) -> None:
            database.write(work)
            # A fail-over takes longer than this.
            then = database.query("SELECT now_us()")[0][0]
            wait_until(lambda: database.query("SELECT now_us()")[0][0] > then + seconds * 1_000_000)

        return forget

    return remember


@pytest.mark.parametrize("size", [10, 2 * INLINE_BYTES], ids=["inline", "stored"])
@pytest.mark.parametrize("is_clock_wrong", [False, True], ids=["", "same id"])
def test_of_a_forgotten_session_and_the_next_one_all_acked_events_are_stored(
    place: Place,
    store: hw.Store,
    remember: Remember,
    monkeypatch: pytest.MonkeyPatch,
    is_clock_wrong: bool,
    size: int,
) -> None:
    """Both have made as many flushes by then: with one number for both, one would get the other's answers."""
    expected = []

    def write(writer: hw.Writer, name: str) -> None:
        value = name.encode().ljust(size, b".")
        writer.write(value).result()
        expected.append(value)

    forget = remember()
    old = store.stream("a/x").writer()
    for _ in range(3):
        old.write(b"forgotten".ljust(size, b".")).result()
    ((id,),) = store._engine.database.query("SELECT id FROM session")
    forget()
    if is_clock_wrong:
        ids = iter([id])
        monkeypatch.setattr(sessions, "next_id", lambda tx, name: next(ids, None) or next_id(tx, name))
    with old, place.open() as other, other.stream("a/x").writer() as new:
        for number in range(3):
            write(new, f"new {number}")
        for number in range(3):
            write(old, f"old {number}")
            write(new, f"newer {number}")
    assert [event.value for event in store.stream("a/x").read()] == expected


def test_of_forgotten_upkeep_nothing_is_missed(place: Place, store: hw.Store, remember: Remember) -> None:
    """The blocks of which it made chunks are still there, and named again."""
    expected = [b"%d" % number * INLINE_BYTES for number in range(4)]
    with place.open() as other, other.stream("a/x").writer() as writer:
        for value in expected:
            writer.write(value)
    store._engine.database.garbage_seconds = 600.0
    forget = remember()
    assert store.run_upkeep().events_tiered == len(expected)
    assert store.run_upkeep().objects_deleted == 0
    forget()
    assert [event.value for event in store.stream("a/x").read()] == expected
    assert store.run_upkeep().events_tiered == len(expected)
    assert [event.value for event in store.stream("a/x").read()] == expected


def test_a_named_writer_that_was_forgotten_is_fenced(place: Place, store: hw.Store, remember: Remember) -> None:
    with store.stream("a/x").writer() as writer:
        writer.write(b"kept")
    forget = remember()
    old = store.stream("a/x").writer("me")
    old.write(b"forgotten").result()
    forget()
    with place.open() as other, other.stream("a/x").writer("me") as new:
        new.write(b"new").result()
        with pytest.raises(FencedError):
            old.write(b"old")
            old.flush()
        old.close()
        new.write(b"newer").result()
    assert [event.value for event in store.stream("a/x").read()] == [b"kept", b"new", b"newer"]


def test_a_reader_that_was_forgotten_is_fenced(place: Place, store: hw.Store, remember: Remember) -> None:
    with store.stream("a/x").writer() as writer:
        writer.write(b"one")
    group = store.reader_group("group", ["a/x"])
    forget = remember()
    old = group.reader("me")
    assert next(iter(old)).value == b"one"
    forget()
    with place.open() as other, other.reader_group("group").reader("me") as new:
        assert next(iter(new)).value == b"one"
        with pytest.raises(FencedError):
            old.commit()


def test_a_stream_that_was_forgotten_is_not_found_though_another_was_made_since(place: Place, store: hw.Store, remember: Remember) -> None:
    forget = remember()
    old = store.create_stream("a/forgotten").writer()
    forget()
    with place.open() as other:
        other.create_stream("a/new")
        with pytest.raises(NotFoundError):
            old.write(b"lost")
            old.flush()
        old.close()
        assert list(other.stream("a/new").read()) == []


def test_a_group_that_was_forgotten_is_not_found_though_another_was_made_since(place: Place, store: hw.Store, remember: Remember) -> None:
    with store.stream("a/x").writer() as writer:
        writer.write(b"one")
    forget = remember()
    old = store.reader_group("old", ["a/x"]).reader("me")
    assert next(iter(old)).value == b"one"
    forget()
    with place.open() as other:
        new = other.reader_group("new", ["a/x"])
        with new.reader("me"), pytest.raises(NotFoundError):
            old.commit()
        assert new.lag().events == 1


def values(store: hw.Store, name: str = "a/x") -> list[Any]:
    return [event.value for event in store.stream(name).read()]


def test_a_named_writer_leaves_no_gap_where_its_acked_numbers_were_forgotten(place: Place, store: hw.Store, remember: Remember) -> None:
    writer = store.stream("a/x").writer("source")
    writer.write(b"1", number=1).result()
    forget = remember()
    writer.write(b"2", number=2).result()
    forget()
    writer.write(b"3", number=3)
    with pytest.raises(FencedError, match="it has 1, not 2"):
        writer.flush()
    writer.close()
    with place.open() as other, other.stream("a/x").writer("source") as again:
        assert again.last_number == 1
    assert values(store) == [b"1"]


@pytest.mark.parametrize("forgotten", ["all of it", "its last batch"])
def test_a_transaction_that_lost_what_it_staged_is_not_committed(store: hw.Store, remember: Remember, forgotten: str) -> None:
    group = store.reader_group("group", ["a/x"])
    with store.stream("a/x").writer() as writer:
        writer.write(b"in")
    store.create_stream("a/out")
    with group.reader("r", commit="manual") as reader:
        assert next(iter(reader)).value == b"in"
        tx = store.transaction()
        forget = remember()
        tx.write("a/out", b"one")
        tx.flush()
        if forgotten == "its last batch":
            forget = remember()
            tx.write("a/out", b"two")
            tx.flush()
        tx.commit_reader(reader)
        forget()
        tx.write("a/out", b"three")
        with pytest.raises(TransactionEndedError, match="went back in time"):
            tx.commit()
        assert tx.status is hw.TransactionStatus.ABORTED
    assert values(store, "a/out") == [] and group.lag().events == 1


def test_a_transaction_does_not_stage_behind_what_was_forgotten(store: hw.Store, remember: Remember) -> None:
    tx = store.transaction()
    tx.write("a/x", b"one")
    tx.flush()
    forget = remember()
    tx.write("a/x", b"two")
    tx.flush()
    forget()
    tx.write("a/x", b"three")
    with pytest.raises(TransactionEndedError, match="went back in time"):
        tx.flush()
    assert values(store) == []


def test_a_transaction_that_lost_what_it_took_over_is_not_committed(store: hw.Store, remember: Remember) -> None:
    part, whole = store.transaction(), store.transaction()
    part.write("a/x", b"one")
    part.flush()
    assert whole.id
    forget = remember()
    whole.adopt([part.id])
    forget()
    with pytest.raises(TransactionEndedError, match="went back in time"):
        whole.commit()
    assert part.status is hw.TransactionStatus.OPEN
    part.abort()
    assert values(store) == []


@pytest.mark.parametrize("how", ["adopted", "resumed and committed", "resumed and staged to"])
@pytest.mark.parametrize("size", [10, 2 * INLINE_BYTES], ids=["inline", "stored"])
def test_by_its_receipt_a_transaction_that_lost_its_last_batch_is_not_committed(
    place: Place, store: hw.Store, remember: Remember, size: int, how: str
) -> None:
    part = store.transaction()
    part.write("a/x", b"one".ljust(size))
    part.flush()
    forget = remember()
    part.write("a/x", b"two".ljust(size))
    part.flush()
    receipt = part.receipt
    forget()
    with place.open() as other, pytest.raises(TransactionEndedError, match="went back in time"), other.transaction() as whole:
        if how == "adopted":
            whole.adopt([receipt])
        else:
            resumed = other.resume_transaction(receipt)
            resumed.write("a/x", b"three")
            resumed.commit() if how == "resumed and committed" else resumed.flush()
    part.abort()
    assert values(store) == []


def test_a_task_s_rows_of_which_a_batch_was_forgotten_are_not_committed(store: hw.Store, remember: Remember) -> None:
    """The message of a Spark task: the driver that adopts what the task staged."""
    piece = SparkPiece(store, read_sink_options({"store": "x", "stream": "a/x"}), hw.Marker("spark/query/a/x", 0))
    forget: list[Callable[..., None]] = []
    for number in range(3):
        piece.add(pa.record_batch({"value": [b"%d" % number * 100_000]}))
        if number == 1:
            wait_until(lambda: all(task.done() for task in piece._under_way))
            assert piece._tx is not None
            piece._tx.flush()
            forget.append(remember())
    message = Staged(0, "query", 0)
    piece.finish(message)
    forget[0]()
    with pytest.raises(TransactionEndedError, match="went back in time"), store.transaction() as whole:
        gather(whole, [message], None)
    piece.drop()
    assert values(store) == []


def test_files_whose_rows_were_forgotten_before_the_commit_are_read_again(store: hw.Store, remember: Remember, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"name": name}) + "\n")

    rounds = count()

    def forget_once(stage: Callable[[FileTask], StagedFile], tasks: Sequence[FileTask]) -> list[StagedFile]:
        found = [stage(task) for task in tasks]
        if not next(rounds):
            store._engine.database.write(lambda tx: [tx.run(f"DELETE FROM {table}") for table in ("txn_term", "txn_extent")])
        return found

    assert ingest(store, folder, "a/rows", spread=forget_once).events == 2
    assert next(rounds) == 2
    assert values(store, "a/rows") == [{"name": "one"}, {"name": "two"}]


def test_a_writer_of_a_schema_that_was_forgotten_stores_nothing_that_can_t_be_read(
    place: Place, store: hw.Store, remember: Remember
) -> None:
    store.create_stream("a/typed", schema=pa.schema({"id": pa.int64()}))
    forget = remember()
    store.stream("a/typed").update(schema=pa.schema({"id": pa.int64(), "lost": pa.string()}))
    old = store.stream("a/typed").writer()
    old.write({"id": 1, "lost": "x"}).result()
    forget(seconds=1)
    with place.open() as other:
        other.stream("a/typed").update(schema=pa.schema({"id": pa.int64(), "other": pa.float64()}))
        old.write({"id": 2, "lost": "x"})
        with pytest.raises(InvalidRequestError, match="went back in time"):
            old.flush()
        old.close()
        with other.stream("a/typed").writer() as new:
            new.write({"id": 3, "other": 0.5})
        assert values(other, "a/typed") == [{"id": 3, "other": 0.5}]


@pytest.mark.parametrize("how", ["writer", "transaction"])
def test_keys_go_where_they_belong_though_other_segments_have_the_numbers_of_forgotten_ones(
    place: Place, store: hw.Store, remember: Remember, how: str
) -> None:
    stream = store.stream("a/x")
    forget = remember()
    stream.split(0)

    def write(name: bytes, *, of: hw.Store = store) -> None:
        if how == "transaction":
            with of.transaction() as tx:
                for key in range(20):
                    tx.write("a/x", name, key=key)
        else:
            with of.stream("a/x").writer() as writer:
                for key in range(20):
                    writer.write(name, key=key)

    write(b"forgotten")
    forget()
    with place.open() as other:
        other.stream("a/x").split(0, parts=3)
        write(b"new", of=other)
        write(b"old")
        found: dict[bytes, set[int]] = {}
        for event in other.stream("a/x").read():
            found.setdefault(event.key, set()).add(event.position.segment)
    assert len(found) == 20 and all(len(places) == 1 for places in found.values())
    assert sorted(values(store)) == [b"new"] * 20 + [b"old"] * 20


def test_shared_state_is_what_the_catalog_has_and_updates_are_decided_on_that(place: Place, store: hw.Store, remember: Remember) -> None:
    def names(of: hw.Store) -> hw.Synchronizer[list[str], str]:
        return of.synchronizer("a/names", initial=[], apply=lambda state, update: [*state, update])

    old = names(store)
    old.update(lambda _: ["kept"])
    forget = remember()
    for name in ("lost", "lost too"):
        old.update(lambda _, name=name: [name])  # type: ignore[misc]
    forget()
    assert old.fetch() == ["kept"], "it is behind what was read"
    old.update(lambda _: ["lost"])
    forget()
    with place.open() as other:
        names(other).update(lambda _: ["new"])
        assert old.update(lambda state: [f"after {state[-1]}"]) == ["kept", "new", "after new"]
        assert names(other).fetch() == ["kept", "new", "after new"]


def test_a_reader_hears_of_a_reset_though_one_before_it_was_forgotten(place: Place, store: hw.Store, remember: Remember) -> None:
    group = store.reader_group("group", ["a/x"])
    with store.stream("a/x").writer() as writer, group.reader("r", commit="manual") as reader:
        for _ in range(20):
            writer.write(b"kept").result()
        for _ in range(5):
            reader.read()
        reader.commit()
        forget = remember()
        group.reset("tail")
        for _ in range(5):
            writer.write(b"forgotten").result()
        assert next(iter(reader)).value == b"forgotten"
        forget(seconds=1)
        for _ in range(5):
            writer.write(b"new").result()
        with place.open() as other:
            other.reader_group("group").reset("head")
        then = time.monotonic()
        wait_until(lambda: time.monotonic() > then + 1)  # By then it looks at its group again.
        assert next(iter(reader)).value == b"kept"
        reader.commit()
        assert group.lag().events == 24


def test_no_id_is_given_twice_also_of_those_that_were_taken_all_at_once(place: Place, store: hw.Store, remember: Remember) -> None:
    forget = remember()
    before = [store.create_stream(f"b/{number}", scaling=hw.Scaling.fixed(50))._ref.id for number in range(20)]
    forget()
    with place.open() as other:
        after = [other.create_stream(f"c/{number}", scaling=hw.Scaling.fixed(50))._ref.id for number in range(20)]
    assert min(after) > max(before)


def test_a_reader_of_forgotten_events_commits_none_of_them_and_gets_the_next_ones(store: hw.Store, remember: Remember) -> None:
    group = store.reader_group("group", ["a/x"])
    with group.reader("r", commit="manual") as reader:
        assert reader.read(timeout=0) is None
        forget = remember()
        with store.stream("a/x").writer() as writer:
            writer.write(b"forgotten")
        event = reader.read(timeout=10)
        assert event is not None and event.value == b"forgotten"
        forget()
        with pytest.raises(hw.ConflictError, match="went back"):
            reader.commit()
        with store.stream("a/x").writer() as writer:
            writer.write(b"next")
        event = reader.read(timeout=10)
        assert event is not None and event.value == b"next"
        reader.commit()
        assert group.lag().events == 0
