"""A second process that writes on command: one JSON line in, one line out when it is durable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pyarrow as pa

import headwater as hw


class SecondProcess:
    """Another process with the same store open, for as long as the block lasts."""

    def __init__(self, path: Path, catalog: str | None) -> None:
        command = [sys.executable, "-m", "tests.property.second_process", str(path), catalog or ""]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=root)

    def write(self, stream: str, events: list[tuple[str | None, str]], *, as_batch: bool) -> None:
        """Write (key, value) pairs; returns when they are durable."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([stream, events, as_batch]) + "\n")
        answer = self._process.stdout.readline()
        assert answer == "durable\n", answer

    def __enter__(self) -> SecondProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(60) == 0


def main(path: str, catalog: str) -> None:
    # One writer for each stream, opened once: its routes grow old while the other process splits and merges.
    writers: dict[int, hw.Writer] = {}
    with hw.open(path, catalog=catalog or None) as store:
        for line in sys.stdin:
            name, events, as_batch = json.loads(line)
            stream = store.stream(name)
            if stream.id not in writers:
                for old in writers.values():
                    old.close()
                writers = {stream.id: stream.writer()}
            writer = writers[stream.id]
            if as_batch:
                columns = {"value": [value.encode() for _, value in events], "key": pa.array([key for key, _ in events], pa.string())}
                writer.write_batch(pa.table(columns), key="key")
            else:
                for key, value in events:
                    writer.write(value, key=key)
            writer.flush()
            print("durable", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
