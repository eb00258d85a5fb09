"""Named writers: the last source number stored for each, and the generation that tells its present holder from older ones."""

from __future__ import annotations

from headwater.catalog.database import Tx
from headwater.catalog.operations import operation
from headwater.catalog.schema import later
from headwater.catalog.streams import lock_stream


@operation("commit", repeatable=True)
def open_writer(tx: Tx, stream: int, writer: str) -> tuple[int, int]:
    """(generation, last number) for a new holder of this id. Older holders are fenced from here on."""
    lock_stream(tx, stream)
    # Generations follow the clock, as ids do (`next_id`): none is given twice by a catalog that forgot its last commits.
    rows = tx.run(
        "INSERT INTO writer (stream, id, last_number, generation) VALUES (?, ?, 0, now_us()) ON CONFLICT (stream, id) DO UPDATE "
        f"SET generation = {later('writer', 'generation')} RETURNING generation, last_number",
        (stream, writer),
    )
    return rows[0][0], rows[0][1]


def list_writers(tx: Tx, stream: int) -> list[tuple[str, int]]:
    """(id, last number) of each named writer."""
    return [(row[0], row[1]) for row in tx.run("SELECT id, last_number FROM writer WHERE stream = ? ORDER BY id", (stream,))]
