"""The ingester that the demo kills: `python -m headwater.cli.demo.worker STORE STREAM FOLDER EVENTS_PER_SECOND`.

A named writer for each file, and the line's number as the event's: started again, it asks the store how far it came. That is all of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import headwater as hw
from headwater.cli.demo.files import parse_line

_FLUSH_EVENTS = 50


def ingest(stream: hw.Stream, paths: list[Path], events_per_second: float) -> None:
    """Store every line of every file that is not stored yet."""
    started, done = time.monotonic(), 0
    for path in paths:
        with stream.writer(path.name) as writer, path.open(encoding="utf-8") as file:
            stored = writer.last_number
            for number, line in enumerate(file, start=1):
                if number <= stored:
                    continue
                row = parse_line(line)
                writer.write(row, key=row["sensor"], time=row["at"], number=number)
                done += 1
                if done % _FLUSH_EVENTS == 0:
                    writer.flush()
                    # Without this it is over before anything could be killed.
                    time.sleep(max(0.0, started + done / events_per_second - time.monotonic()))


def end_with_parent() -> None:
    """End this process when the one that started it does, however that ends: then our standard input closes."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    end_with_parent()
    url, name, folder, events_per_second = sys.argv[1:]
    with hw.open(url, create=False) as store:
        ingest(store.stream(name), sorted(Path(folder).glob("*.jsonl")), float(events_per_second))


if __name__ == "__main__":
    main()
