"""The demo's input: files of sensor readings, one JSON object per line, the same for the same seed."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.model.keys import KEY_SPACE, hash_key

SENSORS = 8
#: Sensors with a key in the lower half of the key space report so much more often: one segment is busy.
BUSY = 4
SCHEMA = pa.schema(
    [
        pa.field("sensor", pa.string(), nullable=False),
        pa.field("reading", pa.int64(), nullable=False),
        pa.field("celsius", pa.float64(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
_BEGINNING = datetime(2031, 5, 1, 12, tzinfo=UTC)


def make_files(folder: Path, *, files: int, events: int, seed: int) -> list[Path]:
    """Write the files. Each is one site with sensors of its own, each of which counts its readings from 1."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    return [_make_file(folder / f"site-{number:02d}.jsonl", events, chance) for number in range(1, files + 1)]


def _make_file(path: Path, events: int, chance: random.Random) -> Path:
    sensors = [f"{path.stem}-{letter}" for letter in "abcdefgh"[:SENSORS]]
    weights = [BUSY if hash_key(sensor.encode()) < KEY_SPACE // 2 else 1 for sensor in sensors]
    readings = dict.fromkeys(sensors, 0)
    with path.open("w", encoding="utf-8") as file:
        for second, sensor in enumerate(chance.choices(sensors, weights, k=events)):
            readings[sensor] += 1
            at = (_BEGINNING + timedelta(seconds=second)).isoformat()
            row = {"sensor": sensor, "reading": readings[sensor], "celsius": round(chance.gauss(17, 4), 2), "at": at}
            file.write(f"{json.dumps(row)}\n")
    return path


def parse_line(line: str) -> dict[str, Any]:
    """A line as a row of SCHEMA."""
    row: dict[str, Any] = json.loads(line)
    row["at"] = datetime.fromisoformat(row["at"])
    return row
