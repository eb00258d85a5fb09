"""Tags: named cuts that keep what lies before them readable, also when it is truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headwater.catalog import segments
from headwater.catalog.database import Row, Statement, Tx
from headwater.catalog.operations import Right, operation
from headwater.catalog.segments import SegmentRow

Pins = dict[int, list[tuple[int, int]]]


def is_kept(row: SegmentRow, start: int, end: int, pins: Pins) -> bool:
    """Whether numbers [start, end) of a segment are readable, or kept by a tag."""
    if start >= row.head and not row.dropped:
        return True
    needed = end if row.dropped else min(end, row.head)
    return any(first <= start and needed <= until for first, until in pins.get(row.number, ()))


def insert_tag(tx: Tx, name: str, cut: str, head: str, pins: list[tuple[int, int, int, int]]) -> bool:
    """Name a cut, and pin (stream, segment, first, until); False if the name is taken. The caller has locked the streams."""
    made = tx.run(
        "INSERT INTO tag (name, cut, head, created_at) VALUES (?, ?, ?, now_us()) ON CONFLICT (name) DO NOTHING RETURNING name",
        (name, cut, head),
    )
    if made:
        tx.defer("INSERT INTO pin (tag, stream, segment, first, until) VALUES (?, ?, ?, ?, ?)", [(name, *pin) for pin in pins])
    return bool(made)


@operation("statement")
def list_tags(tx: Tx) -> list[tuple[str, str, str]]:
    """(name, cut, head then)."""
    return [(row[0], row[1], row[2]) for row in tx.run("SELECT name, cut, head FROM tag WHERE expires_at IS NULL ORDER BY name")]


def find_head(tx: Tx, stream: int, cut: Mapping[int, int], text: str) -> str | None:
    """The head at the time of the first tag whose cut has this part for a stream; `text` is the part as the cut's text has it."""
    # A tag keeps each segment that its cut names up to the cut. Of these segments the newest is kept by the fewest other tags.
    newest = max(cut)
    rows = tx.run(
        "SELECT t.head FROM pin p JOIN tag t ON t.name = p.tag WHERE p.stream = ? AND p.segment = ? AND p.until = ? "
        "AND t.expires_at IS NULL AND replace(t.cut, ?, '') <> t.cut ORDER BY t.name LIMIT 1",
        (stream, newest, cut[newest], text),
    )
    return str(rows[0][0]) if rows else None


def _hold_name(name: str) -> str:
    # With a space, which no tag's name has: no operation on a hold can reach a tag.
    return f"hold {name}"


def lock_held(tx: Tx, hold: str, others: Sequence[int]) -> None:
    """Lock the streams that a hold pins, and others."""
    _lock_pinned(tx, _hold_name(hold), others)


def _lock_pinned(tx: Tx, name: str, others: Sequence[int] = ()) -> None:
    """Lock the streams that a tag or hold pins, and others: no one else finds something kept by it, and is left without it by its end."""
    named = " OR id = ?" * len(others)
    tx.run(f"SELECT id FROM stream WHERE id IN (SELECT stream FROM pin WHERE tag = ?){named} ORDER BY id FOR UPDATE", (name, *others))


def hold(tx: Tx, name: str, pins: list[tuple[int, int, int, int]], lease_us: int) -> None:
    """Pin (stream, segment, first, until) for a while, in place of what a hold of this name held before.

    The caller has locked the streams of both.
    """
    row = _hold_name(name)
    tx.run(
        "INSERT INTO tag (name, cut, head, created_at, expires_at) VALUES (?, '', '', now_us(), now_us() + ?) "
        "ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at",
        (row, lease_us),
    )
    before = tx.run("DELETE FROM pin WHERE tag = ? RETURNING stream, segment", (row,))
    tx.run_all([("INSERT INTO pin (tag, stream, segment, first, until) VALUES (?, ?, ?, ?, ?)", (row, *pin)) for pin in pins])
    _forget_unpinned(tx, sorted(before))


@operation("statement")
def has_expired(tx: Tx) -> bool:
    return bool(tx.run("SELECT 1 FROM tag WHERE expires_at < now_us() LIMIT 1"))


@operation("commit", repeatable=True)
def delete_expired(tx: Tx) -> None:
    """Forget the holds of readers that did not renew them."""
    # Streams before tags, as everywhere. The tags are locked too, and looked at again by that: one that is renewed at this moment stays.
    expired = "SELECT p.stream FROM pin p JOIN tag t ON t.name = p.tag WHERE t.expires_at < now_us()"
    tx.run(f"SELECT id FROM stream WHERE id IN ({expired}) ORDER BY id FOR UPDATE")
    for (name,) in tx.run("SELECT name FROM tag WHERE expires_at < now_us() ORDER BY name FOR UPDATE"):
        _delete(tx, name, _IS_HOLD)


@operation("commit")
def delete_tag(tx: Tx, name: str) -> bool:
    """Forget a tag, and the segments that only it kept; False if there is none. A hold of this name stays."""
    return _delete(tx, name, "expires_at IS NULL")


_IS_HOLD = "expires_at IS NOT NULL"


@operation("commit", repeatable=True)
def end_hold(tx: Tx, name: str) -> bool:
    """Forget a hold, and the segments that only it kept; False if there is none. A tag of this name stays."""
    return _delete(tx, _hold_name(name), _IS_HOLD)


def _delete(tx: Tx, name: str, condition: str) -> bool:
    _lock_pinned(tx, name)
    sql = f"DELETE FROM pin WHERE tag = ? AND EXISTS (SELECT 1 FROM tag WHERE name = pin.tag AND {condition}) RETURNING stream, segment"
    pinned = tx.run(sql, (name,))
    gone = tx.run(f"DELETE FROM tag WHERE name = ? AND {condition} RETURNING name", (name,))
    _forget_unpinned(tx, sorted(pinned))
    return bool(gone)


def _forget_unpinned(tx: Tx, places: list[Row]) -> None:
    for stream, segment in places:
        row = segments.find_segment(tx, stream, segment)
        others = tx.run("SELECT 1 FROM pin WHERE stream = ? AND segment = ? LIMIT 1", (stream, segment))
        if row is not None and row.dropped and not others:
            segments.forget_segments(tx, stream, [segment])


@operation("commit", repeatable=True)
def forget_dropped(tx: Tx) -> int:
    """Forget truncated segments whose last tag went while they were truncated; returns how many."""
    places = tx.run(
        "SELECT s.stream, s.number FROM segment s WHERE s.dropped = 1 "
        "AND NOT EXISTS (SELECT 1 FROM pin p WHERE p.stream = s.stream AND p.segment = s.number) ORDER BY s.stream, s.number"
    )
    if not places:
        return 0
    tx.run_all([("SELECT id FROM stream WHERE id = ? FOR UPDATE", (stream,)) for stream in sorted({place[0] for place in places})])
    _forget_unpinned(tx, places)
    return len(places)


@operation("statement", right=Right("read", "stream"))
def get_pins(tx: Tx, stream: int) -> Pins:
    """The pinned ranges of each segment of a stream."""
    found: Pins = {}
    for segment, first, until in tx.run("SELECT segment, first, until FROM pin WHERE stream = ?", (stream,)):
        found.setdefault(segment, []).append((first, until))
    return found


def named_of(stream: int) -> Statement:
    """The statement that lists the names of the tags of a stream."""
    return (
        "SELECT DISTINCT p.tag FROM pin p JOIN tag t ON t.name = p.tag WHERE p.stream = ? AND t.expires_at IS NULL ORDER BY p.tag",
        (stream,),
    )
