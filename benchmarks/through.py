"""A program that streams events in and out and prints its own memory: `memory` runs it, so that only its own imports count.

As where only headwater is installed: pyarrow imports pandas as soon as there is one, as there is here for Spark, and that is 56 MB.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import pyarrow as pa

import headwater as hw

_MB = 1_000_000
_SIZE = 1000
_ROWS = 4000


class _WithoutPandas:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ImportError(name)


def main(url: str, catalog: str, megabytes: int) -> None:
    """Events of 1 kB, half one by one and half as batches, then all of it as Arrow. Prints the memory before and at most."""
    sys.meta_path.insert(0, _WithoutPandas())
    before = _peak_mb()
    values = [os.urandom(_SIZE) for _ in range(_ROWS)]
    keys = [b"user-%d" % (index % 100) for index in range(_ROWS)]
    batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary()), pa.array([key.decode() for key in keys])], ["value", "user"])
    rounds = max(1, megabytes * _MB // 2 // _SIZE // _ROWS)
    with hw.open(url, catalog=catalog or None) as store:
        stream = store.create_stream("bench/through", scaling=hw.Scaling.fixed(4))
        with stream.writer() as writer:
            for number in range(rounds):
                for value, key in zip(values, keys, strict=True):
                    # Each a value of its own, as those of a program that reads them from somewhere.
                    writer.write(b"%016d" % number + value[16:], key)
            for _ in range(rounds):
                writer.write_batch(batch, key="user")
        found = sum(part.num_rows for item in stream.ranges() for part in item.to_batches())
        assert found == sum(segment.events for segment in stream.segments())
    print(json.dumps([before, _peak_mb()]))


def _peak_mb() -> float:
    """The most resident memory this process had."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: on Linux that begins with what the parent process had.
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 / _MB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak if sys.platform == "darwin" else peak * 1024) / _MB


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
