"""Words: the tags and types of a journal's events, and where the events with a tag are."""

from __future__ import annotations

from typing import NamedTuple

from headwater.catalog.database import Tx
from headwater.catalog.operations import Right, operation

#: The kinds of words.
TAG, TYPE = 0, 1


class WordRow(NamedTuple):
    """A word in one segment: the number of its last event, how many it has, and of a tag its newest numbers."""

    segment: int
    number: int
    count: int  # type: ignore[assignment]  # the tuple method of this name is of no use here
    recent: str


@operation("statement", right=Right("read", "stream"))
def list_words(tx: Tx, stream: int, kind: int, word: str) -> list[WordRow]:
    """A word's rows, by segment."""
    sql = "SELECT segment, number, count, recent FROM word WHERE stream = ? AND kind = ? AND word = ? ORDER BY segment"
    return [WordRow(*row) for row in tx.run(sql, (stream, kind, word))]


@operation("statement", right=Right("read", "stream"))
def list_word_pages(tx: Tx, stream: int, word: str, segment: int, first: int, end: int, limit: int) -> list[tuple[int, str]]:
    """(first number, numbers) of the pages that hold some of a tag's numbers [first, end) in a segment, in order; at most `limit`."""
    place = stream, word, segment
    return [
        (row[0], row[1])
        for row in tx.run(
            "SELECT first, numbers FROM word_page WHERE stream = ? AND word = ? AND segment = ? AND first >= "
            "COALESCE((SELECT max(first) FROM word_page WHERE stream = ? AND word = ? AND segment = ? AND first <= ?), 0) AND first < ? "
            "ORDER BY first LIMIT ?",
            (*place, *place, first, end, limit),
        )
    ]


@operation("statement", right=Right("read", "stream"))
def find_recent(tx: Tx, stream: int, word: str, segment: int) -> str:
    """A tag's numbers in a segment that are in no page yet."""
    rows = tx.run("SELECT recent FROM word WHERE stream = ? AND kind = 0 AND word = ? AND segment = ?", (stream, word, segment))
    return rows[0][0] if rows else ""
