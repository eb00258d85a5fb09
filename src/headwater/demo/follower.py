"""The reader that the demo leaves alone: `python -m headwater.demo.follower STORE STREAM`.

It follows the tail until the stream is sealed, counts, and checks the order of each sensor's readings. Its counts go to standard output.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress

import headwater as hw
from headwater.demo.orphans import end_with_parent

_REPORT_SECONDS = 0.1


class Count:
    """How many events were seen, and how many came before one that they should follow."""

    def __init__(self) -> None:
        self.seen = 0
        self.disordered = 0
        self._last: dict[str, int] = {}

    def add(self, event: hw.Event) -> None:
        sensor, reading = event.value["sensor"], event.value["reading"]
        self.seen += 1
        self.disordered += reading != self._last.get(sensor, 0) + 1
        self._last[sensor] = reading

    def report(self) -> None:
        print(json.dumps({"seen": self.seen, "disordered": self.disordered}), flush=True)


def main() -> None:
    end_with_parent()
    url, name = sys.argv[1:]
    count, done = Count(), threading.Event()

    def report() -> None:
        # If the demo was killed, nobody listens any more, and this process ends too.
        with suppress(BrokenPipeError):
            while not done.wait(_REPORT_SECONDS):
                count.report()

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    with hw.open(url, create=False) as store:
        for event in store.stream(name).read(follow=True):
            count.add(event)
    done.set()
    reporter.join()
    count.report()


if __name__ == "__main__":
    main()
