"""The demo's input: sensor readings as JSON lines, in files that cover 20 seconds each, the same for the same seed.

Some readings come late: a sensor was out of reach, and sent what it had measured when it was back. The last come long after all others.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.model.keys import KEY_SPACE, hash_key

SITES = 6
SENSORS_PER_SITE = 8
#: Sensors with a key in the lower half of the key space report so much more often: one segment is busy.
BUSY = 4
#: Readings above this are hot; each site has its own.
LIMITS = {f"site-{number}": 18.0 + number for number in range(1, SITES + 1)}
SENSORS = {f"{site}-{letter}": site for site in LIMITS for letter in "abcdefgh"[:SENSORS_PER_SITE]}
FILE_SECONDS = 20
LATE_SHARE, LATEST_SECONDS = 0.02, 90
#: The pipeline's windows are closed when all readings are known to be in; the last reading of each site says so.
WATERMARK_SECONDS, WINDOW_SECONDS = 120, 60
LAST_AFTER_SECONDS = 600
BEGINNING = datetime(2031, 5, 1, 12, tzinfo=UTC)

SCHEMA = pa.schema(
    [
        pa.field("sensor", pa.string(), nullable=False),
        pa.field("reading", pa.int64(), nullable=False),
        pa.field("celsius", pa.float64(), nullable=False),
        pa.field("at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
#: The same for the command line.
SCHEMA_TEXT = "sensor:string!,reading:int64!,celsius:double!,at:timestamp!"


def make_files(folder: Path, *, files: int, events: int, seed: int) -> list[Path]:
    """Write the files. Each sensor counts its readings from 1, over all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    weights = [BUSY if hash_key(sensor.encode()) < KEY_SPACE // 2 else 1 for sensor in SENSORS]
    readings = dict.fromkeys(SENSORS, 0)
    paths = []
    for number in range(files):
        sensors = chance.choices(list(SENSORS), weights, k=events)
        times = [BEGINNING + timedelta(seconds=FILE_SECONDS * (number + index / events)) for index in range(events)]
        times = [at - timedelta(seconds=_delay(chance)) for at in times]
        if number == files - 1:
            # One of each site, in the place of the last ones.
            last = [next(sensor for sensor, found in SENSORS.items() if found == site) for site in LIMITS][: events - 1]
            sensors[events - len(last) :] = last
            times[events - len(last) :] = [BEGINNING + timedelta(seconds=FILE_SECONDS * files + LAST_AFTER_SECONDS)] * len(last)
        path = folder / f"readings-{number + 1:02d}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for sensor, at in zip(sensors, times, strict=True):
                readings[sensor] += 1
                row = {"sensor": sensor, "reading": readings[sensor], "celsius": round(chance.gauss(19, 4), 2), "at": at.isoformat()}
                file.write(f"{json.dumps(row)}\n")
        paths.append(path)
    return paths


def _delay(chance: random.Random) -> int:
    return chance.randint(1, LATEST_SECONDS) if chance.random() < LATE_SHARE else 0


def parse_line(line: str) -> dict[str, Any]:
    """A line as a row of SCHEMA."""
    row: dict[str, Any] = json.loads(line)
    row["at"] = datetime.fromisoformat(row["at"])
    return row


def enriched(row: dict[str, Any]) -> dict[str, Any]:
    """The row as the pipeline's first stage makes it."""
    site = SENSORS[row["sensor"]]
    return {**row, "site": site, "hot": row["celsius"] > LIMITS[site]}
