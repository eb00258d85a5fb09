"""Every limit of headwater, in one place. Reaching one blocks or raises; nothing is dropped."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

#: One event's value. Larger ones are refused by `write` itself.
EVENT_BYTES: Final = 64 * MIB
#: Lists, structs and maps within each other in a column's type. Of 50 lists no chunk could be read, 32 maps no block could hold.
NESTED_TYPES: Final = 30
#: One routing key.
KEY_BYTES: Final = 64 * KIB
#: The changes of a table that one roll-back makes.
ROLLED_BACK_BYTES: Final = 64 * MIB
#: A `write_batch` up to this size is stored whole or not at all.
BATCH_BYTES: Final = 64 * MIB
#: What one flush gathers before it is sent.
FLUSH_BYTES: Final = 16 * MIB
#: One to many segments gathers more: so much for each of them, up to so much.
FLUSH_BLOCK_BYTES: Final = 2 * MIB
LARGE_FLUSH_BYTES: Final = 32 * MIB
#: Events waiting in one process for their flush; beyond it `write` blocks.
BUFFERED_BYTES: Final = 96 * MIB
#: A flush up to this size goes into the catalog's own commit: one fsync instead of two.
INLINE_BYTES: Final = 64 * KIB
#: A journal file is preallocated at this size, and another begun ahead of when it is full: a process that writes has two of them.
JOURNAL_BYTES: Final = 40 * MIB
#: Storage writes under way at once, local and remote. Their commits stay in order.
LOCAL_WRITES: Final = 4
REMOTE_WRITES: Final = 4
#: Bytes fetched ahead of a reader.
PREFETCH_BYTES: Final = 16 * MIB
#: Extents planned with one look into the catalog.
PLAN_EXTENTS: Final = 256
#: Whoever sees a SQLite WAL above this size checkpoints it.
WAL_BYTES: Final = 4 * MIB
#: A writer waits this long for the catalog's lock before it says who holds it.
LOCK_SECONDS: Final = 10.0
#: PostgreSQL: making a connection, one transaction, and a server that says nothing: by then it would have ended the transaction.
CONNECT_SECONDS: Final = 10.0
TRANSACTION_SECONDS: Final = 30.0
SILENT_SECONDS: Final = 40.0
#: Remote storage and PostgreSQL are tried again for this long before an error reaches the caller.
RETRY_SECONDS: Final = 20.0
#: `hw.open`, where no PostgreSQL listens.
ABSENT_SECONDS: Final = 2.0
#: One request to an object store, and, of a read of more than so many bytes, the time in which none arrive.
REQUEST_SECONDS: Final = 30.0
TRANSFER_BYTES: Final = 4 * MIB
#: All of such a read: 128 MiB at half a megabyte per second.
TRANSFER_SECONDS: Final = 300.0
#: A put of more than that, by its largest size: two seconds more for each MiB, and REMOTE_WRITES of them share the line. A flush is in the
#: first two, a chunk may be in the last.
PUT_SECONDS: Final = {10 * MIB: 50.0, 40 * MIB: 110.0, 128 * MIB: TRANSFER_SECONDS}
#: Tables: one key, one value. A key is in an index, whose rows may have 2.6 KiB on PostgreSQL.
TABLE_KEY_BYTES: Final = 2 * KIB
TABLE_VALUE_BYTES: Final = 1 * MIB
#: Entries, and bytes of their values, that a fork of a table copies under one lock.
FILL_ROWS: Final = 2000
FILL_BYTES: Final = 2 * MIB
#: Upkeep drops a fork of a table whose process has not renewed it for this long.
FILL_SECONDS: Final = 60.0
#: The owner of a marker, which is in an index too.
MARKER_OWNER_BYTES: Final = 2 * KIB
#: A reader of a group that was not seen for this long is taken for dead.
READER_SECONDS: Final = 10.0
#: Event time is noted at most this often by a writer, and a writer that notes none for the second time is idle.
NOTE_SECONDS: Final = 1.0
IDLE_WRITER_SECONDS: Final = 30.0
#: Transactions that one call takes over: the databases take some tens of thousands of values with a statement.
ADOPTED_TRANSACTIONS: Final = 10_000
#: A hold; for longer there are tags.
HOLD_SECONDS: Final = 365 * 86400.0
#: A wait without end: about what the system's own waits take, less than the 292 years in nanoseconds.
WAIT_SECONDS: Final = 100 * 365 * 86400.0
#: A session not renewed for this long may be fenced, and is renewed at a third of it.
SESSION_SECONDS: Final = 60.0
#: Rows deleted under one lock when space is freed.
SLICE_ROWS: Final = 1000
#: Open segments of one stream.
OPEN_SEGMENTS: Final = 10_000
#: Upkeep tiers a log's blocks when they are this many bytes or extents, this old, or sealed; and at most this much in one chunk.
TIER_BYTES: Final = 64 * MIB
TIER_EXTENTS: Final = 1000
TIER_SECONDS: Final = 300.0
CHUNK_BYTES: Final = 128 * MIB
#: Extents swapped for one chunk under one lock.
CHUNK_EXTENTS: Final = 2000
#: So many chunks of about one size, side by side, are made one.
COMPACT_CHUNKS: Final = 8
#: The upkeep's lease, and how long a store is open before its background thread asks for it.
LEASE_SECONDS: Final = 6.0
UPKEEP_DELAY_SECONDS: Final = 5.0
#: Objects that nothing names any more stay this long where a fail-over may take the catalog back to when they were named (PostgreSQL).
GARBAGE_SECONDS: Final = 600.0
#: Finished transactions and fenced sessions are kept this long, the markers of pipelines that committed nothing since this long.
KEPT_SECONDS: Final = 7 * 86400.0
MARKER_SECONDS: Final = 365 * 86400.0
#: Journals: an entity's id, a tag, an event's type, in bytes of UTF-8; the tags of one event; and one persist.
ENTITY_ID_BYTES: Final = 512
EVENT_TAG_BYTES: Final = 256
EVENT_TYPE_BYTES: Final = 128
EVENT_TAGS: Final = 16
PERSIST_EVENTS: Final = 1000
PERSIST_BYTES: Final = 16 * MIB
#: The tags, types and ids of one condition, and the conditions of one persist.
MATCH_WORDS: Final = 16
MATCHES: Final = 16
#: One snapshot of an entity's state.
SNAPSHOT_BYTES: Final = 1 * MIB
#: Rows or events of a journal that a rebuild of its index takes under one lock.
REBUILD_ROWS: Final = 500
#: A persist whose condition may be hit by ever new events is tried this often.
PERSIST_ROUNDS: Final = 20
#: One that expects no sequence is tried this often: each time it loses, another persist of the entity succeeded.
RACE_ROUNDS: Final = 1000
