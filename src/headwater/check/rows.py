"""Rows of the catalog that should not be there, or that name what is not there. Walked in slices, each one statement: one look."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.catalog.database import Database
from headwater.check.report import Problem

_SLICE_ROWS = 2000
_SHOWN = 5

#: (table, what a row of it is, its column, the table and column that it points into)
_REFERENCES = (
    ("stream", "the stream", "scope", "scope", "name"),
    ("segment", "a segment", "stream", "stream", "id"),
    ("stream_label", "a label", "stream", "stream", "id"),
    ("stream_schema", "a schema", "stream", "stream", "id"),
    ("writer", "a writer", "stream", "stream", "id"),
    ("entry", "a table's entry", "stream", "stream", "id"),
    ("filling", "a fill", "stream", "stream", "id"),
    ("stream_load", "a load", "stream", "stream", "id"),
    ("load_history", "a load of the past", "stream", "stream", "id"),
    ("scale_event", "a scaling", "stream", "stream", "id"),
    ("base", "a fork's view", "log", "segment", "log"),
    ("pin", "a pin", "tag", "tag", "name"),
    ("txn_extent", "a staged block", "txn", "txn", "id"),
    ("txn_term", "a staged term", "txn", "txn", "id"),
    ("group_stream", "a stream", "grp", "reader_group", "id"),
    ("group_segment", "a position", "grp", "reader_group", "id"),
    ("group_reader", "a reader", "grp", "reader_group", "id"),
    ("noted_time", "a noted time", "stream", "stream", "id"),
    ("watermark", "a watermark", "stream", "stream", "id"),
    ("floor", "a keep", "stream", "stream", "id"),
    ("undone", "an undone place", "stream", "stream", "id"),
    ("undone", "an undone place", "roll_back", "roll_back", "id"),
    ("roll_back", "a roll-back", "stream", "stream", "id"),
    ("fork_point", "a fork's origin", "stream", "stream", "id"),
)
#: Ids are never used again: the sequence must be at or above all that are in use.
_SEQUENCES = (
    ("stream", "stream", "id"),
    ("stream", "group_stream", "stream"),
    ("stream", "group_segment", "stream"),
    ("stream", "txn_extent", "stream"),
    ("stream", "pin", "stream"),
    ("log", "segment", "log"),
    ("log", "extent", "log"),
    ("log", "base", "source"),
    ("session", "session", "id"),
    ("group", "reader_group", "id"),
)
#: (kind, what is wrong, the rows where it is so: one statement, so one look). Rows about streams that were deleted since may stay behind.
_FAULTS = (
    (
        "counter",
        "the reader group {} is at event {} of {}/{} segment {}, whose tail is {}",
        "SELECT g.name, p.position, st.scope, st.name, s.number, s.tail FROM group_segment p JOIN reader_group g ON g.id = p.grp "
        "JOIN segment s ON s.stream = p.stream AND s.number = p.segment JOIN stream st ON st.id = s.stream "
        "WHERE p.position > s.tail OR p.position < 0",
    ),
    (
        "dangling",
        "the reader group {} is at segment {} of {}/{}, which never had one",
        "SELECT g.name, p.segment, st.scope, st.name FROM group_segment p JOIN reader_group g ON g.id = p.grp "
        "JOIN stream st ON st.id = p.stream WHERE p.segment >= st.next_segment OR p.segment < 0",
    ),
    (
        "dangling",
        "the reader group {} is at segment {} of stream {}, which is none of its streams",
        "SELECT g.name, p.segment, p.stream FROM group_segment p JOIN reader_group g ON g.id = p.grp "
        "WHERE NOT EXISTS (SELECT 1 FROM group_stream o WHERE o.grp = p.grp AND o.stream = p.stream)",
    ),
    (
        "dangling",
        "the reader group {} reads {}, and has no position there",
        "SELECT g.name, o.name FROM group_stream o JOIN reader_group g ON g.id = o.grp "
        "WHERE NOT EXISTS (SELECT 1 FROM group_segment p WHERE p.grp = o.grp AND p.stream = o.stream)",
    ),
    (
        "lineage",
        "{}/{} was rolled back to event {} of segment {}, which ends at {} or is open",
        "SELECT st.scope, st.name, u.first, u.segment, s.tail FROM undone u JOIN stream st ON st.id = u.stream "
        "JOIN segment s ON s.stream = u.stream AND s.number = u.segment WHERE s.tail > u.first OR s.sealed_epoch IS NULL",
    ),
    (
        "lineage",
        "the open segments of {}/{} have {} different claims",
        "SELECT max(st.scope), max(st.name), count(DISTINCT COALESCE(s.claim, '')) FROM segment s JOIN stream st ON st.id = s.stream "
        "WHERE s.sealed_epoch IS NULL GROUP BY s.stream HAVING count(DISTINCT COALESCE(s.claim, '')) > 1",
    ),
    (
        "dangling",
        "transaction {} has a block staged for segment {} of {}/{}, which never had one",
        "SELECT e.txn, e.segment, st.scope, st.name FROM txn_extent e JOIN stream st ON st.id = e.stream "
        "WHERE e.segment >= st.next_segment OR e.segment < 0",
    ),
    (
        # Unlike a tag, a reader's hold does not keep a stream from being deleted.
        "dangling",
        "the tag {} keeps segment {} of stream {}, which does not exist",
        "SELECT p.tag, p.segment, p.stream FROM pin p JOIN tag t ON t.name = p.tag WHERE t.expires_at IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM segment s WHERE s.stream = p.stream AND s.number = p.segment)",
    ),
    (
        "counter",
        "the table {}/{} has version {} of the key {!r}, but its last change is {}",
        "SELECT st.scope, st.name, e.version, e.key, s.tail FROM entry e JOIN stream st ON st.id = e.stream "
        "JOIN segment s ON s.stream = e.stream AND s.number = 0 WHERE e.version > s.tail OR e.version < 1",
    ),
    (
        "dangling",
        "the catalog has a table's entries of {}/{}, which is a stream of {}",
        "SELECT st.scope, st.name, st.kind FROM stream st WHERE st.kind NOT IN ('table', 'filling') "
        "AND EXISTS (SELECT 1 FROM entry e WHERE e.stream = st.id)",
    ),
    (
        "dangling",
        "{}/{} is of kind {!r}, and the catalog's list of the tables that are being filled says otherwise",
        "SELECT st.scope, st.name, st.kind FROM stream st "
        "WHERE (st.kind = 'filling') <> EXISTS (SELECT 1 FROM filling f WHERE f.stream = st.id)",
    ),
)


def list_stream_ids(database: Database) -> list[int]:
    return [row[0] for row in database.query("SELECT id FROM stream ORDER BY scope, name")]


def count_bytes(database: Database) -> int:
    return int(database.query("SELECT COALESCE(sum(bytes), 0) FROM segment")[0][0])


def count_dead_rows(database: Database) -> int:
    """Rows of deleted streams and dropped segments, which upkeep will delete."""
    # A fork keeps what it needs of a dead log.
    unneeded = "NOT EXISTS (SELECT 1 FROM base b WHERE b.source = d.log)"
    return int(database.query(f"SELECT count(*) FROM extent e JOIN dead_log d ON d.log = e.log WHERE {unneeded}")[0][0])


def _find_faults(database: Database) -> Iterator[Problem]:
    for kind, message, sql in _FAULTS:
        for row in database.query(f"{sql} LIMIT {_SHOWN}"):
            yield Problem(kind, message.format(*row))


def _find_orphans(database: Database) -> Iterator[Problem]:
    for table, what, column, target, key in _REFERENCES:
        missing = f"NOT EXISTS (SELECT 1 FROM {target} o WHERE o.{key} = t.{column})"
        sql = f"SELECT DISTINCT t.{column} FROM {table} t WHERE {missing} LIMIT {_SHOWN}"
        for (value,) in database.query(sql):
            yield Problem("dangling", f"the catalog has {what} of the {target} {value}, which does not exist")


def _find_unknown_logs(database: Database) -> Iterator[Problem]:
    # Each step leaps over one log by the index, so that the cost is that of the logs and not of the extents.
    for table, what in (("extent", "extents"), ("inline_block", "inline blocks"), ("tier", "tier rows")):
        log = -1 << 62
        while rows := database.query(
            f"SELECT e.log, (SELECT count(*) FROM segment s WHERE s.log = e.log) + (SELECT count(*) FROM dead_log d WHERE d.log = e.log) "
            f"FROM {table} e WHERE e.log > ? ORDER BY e.log LIMIT 1",
            (log,),
        ):
            log, known = rows[0]
            if not known:
                count = database.query(f"SELECT count(*) FROM {table} WHERE log = ?", (log,))[0][0]
                yield Problem("dangling", f"the catalog has {count} {what} of log {log}, which no segment owns")


def _find_dying_segments(database: Database) -> Iterator[Problem]:
    sql = (
        "SELECT st.scope, st.name, s.number FROM dead_log d JOIN segment s ON s.log = d.log JOIN stream st ON st.id = s.stream "
        "ORDER BY st.scope, st.name, s.number"
    )
    for scope, name, number in database.query(sql):
        message = f"{scope}/{name} segment {number}: the catalog lists it among the dead, whose blocks will be deleted"
        yield Problem("dangling", message, f"{scope}/{name}", number)


def _find_wrong_tiers(database: Database) -> Iterator[Problem]:
    # One statement, so one look: a swap changes extents and tier together.
    sql = (
        "SELECT t.log, t.until, s.tail, (SELECT min(e.first) FROM extent e WHERE e.log = t.log AND e.first < t.until AND e.form = 0), "
        "s.number, st.scope, st.name "
        "FROM tier t LEFT JOIN segment s ON s.log = t.log LEFT JOIN stream st ON st.id = s.stream ORDER BY t.log"
    )
    for log, until, tail, block, number, scope, name in database.query(sql):
        stream = f"{scope}/{name}" if name is not None else None
        where = f"{stream} segment {number}" if stream else f"log {log}"
        said = f"{where}: the catalog says that all before event {until} is in chunks, where upkeep deletes inline blocks"
        if block is not None:
            yield Problem("counter", f"{said}, but at event {block} there is a block", stream, number)
        elif tail is not None and until > tail:
            yield Problem("counter", f"{said}, but its tail is {tail}", stream, number)


def _find_inline_without_extent(database: Database) -> Iterator[Problem]:
    log, first = -1 << 62, 0
    while rows := database.query(
        "SELECT b.log, b.first, e.log, s.stream, s.number, st.scope, st.name FROM inline_block b "
        "LEFT JOIN extent e ON e.log = b.log AND e.first = b.first AND e.object IS NULL "
        "LEFT JOIN segment s ON s.log = b.log LEFT JOIN stream st ON st.id = s.stream LEFT JOIN tier t ON t.log = b.log "
        "WHERE (b.log, b.first) > (?, ?) AND b.first >= COALESCE(t.until, 0) ORDER BY b.log, b.first LIMIT ?",
        (log, first, _SLICE_ROWS),
    ):
        log, first = rows[-1][:2]
        for block_log, at, named, stream, segment, scope, name in rows:
            if named is None and stream is not None:
                message = f"{scope}/{name} segment {segment}: the catalog has an inline block at event {at} that no extent names"
                yield Problem("dangling", message, f"{scope}/{name}", segment)
            elif named is None:
                yield Problem("dangling", f"the catalog has an inline block at event {at} of log {block_log} that no extent names")


def _find_low_sequences(database: Database) -> Iterator[Problem]:
    for name, table, column in _SEQUENCES:
        rows = database.query(f"SELECT max({column}), (SELECT last FROM sequence WHERE name = ?) FROM {table}", (name,))
        used, last = rows[0]
        if used is not None and (last is None or last < used):
            message = f"the catalog's next {name} id would be {(last or 0) + 1}, but {used} is in use, as {table}.{column}"
            yield Problem("counter", message)


def _find_damage(database: Database) -> Iterator[Problem]:
    for fault in database.verify():
        yield Problem("catalog", f"the catalog {database.url} is damaged: {fault}", object=database.url)


#: Each finds faults of its own: rows that point nowhere, that nothing points to, or that don't fit each other.
LOOKS = (
    _find_damage,
    _find_orphans,
    _find_faults,
    _find_unknown_logs,
    _find_dying_segments,
    _find_wrong_tiers,
    _find_inline_without_extent,
    _find_low_sequences,
)
