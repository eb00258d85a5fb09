"""Running the demo: a store, its worker and its follower, the kills, and the split in the middle."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import headwater as hw
from headwater.check import CheckReport, StreamContents, check_store, stream_contents
from headwater.cli.demo.chart import Mark, Sample
from headwater.cli.demo.files import SCHEMA, make_files
from headwater.cli.demo.proof import Proof, prove

STREAM = "demo/readings"
KILL, SPLIT = "✗", "┿"
_SEGMENTS = 2
_POLL_SECONDS = 0.02
#: A kill comes up to so long after the event that it was to follow: anywhere in a flush.
_JITTER_SECONDS = 0.03
_PATIENCE_SECONDS = 120.0


@dataclass
class State:
    """What is to be seen of a run."""

    expected: int
    contents: StreamContents | None = None
    kills: int = 0
    seen: int = 0
    seen_disordered: int = 0
    samples: list[Sample] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    news: list[str] = field(default_factory=list)

    @property
    def stored(self) -> int:
        return self.contents.events if self.contents is not None else 0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: State
    proof: Proof
    report: CheckReport
    seconds: float

    @property
    def holds(self) -> bool:
        return self.proof.holds and self.report.ok and self.state.seen == self.proof.expected and not self.state.seen_disordered


class Demo:
    """One run in a folder of its own. `folder/files` is the input, `folder/store` the store."""

    def __init__(self, folder: Path, *, files: int, events: int, kills: int, seed: int, events_per_second: float) -> None:
        self.store_path = folder / "store"
        self.files_path = folder / "files"
        self.state = State(files * events)
        self._chance = random.Random(seed)
        self._events_per_second = events_per_second
        self._paths = make_files(self.files_path, files=files, events=events, seed=seed)
        total = self.state.expected
        self._kill_at = sorted(self._chance.randrange(total // 20, max(total * 19 // 20, total // 20 + 1)) for _ in range(kills))

    def run(self, show: Callable[[State], None]) -> Outcome:
        """Do it all; `show` is called many times a second."""
        started = time.monotonic()
        with hw.open(self.store_path) as store:
            stream = store.create_stream(STREAM, schema=SCHEMA, scaling=hw.Scaling.fixed(_SEGMENTS))
            with self._process("follower") as follower:
                counter = threading.Thread(target=self._listen, args=(follower,), daemon=True)
                counter.start()
                self._ingest(stream, started, show)
                # The follower reads on to the end of a sealed stream, and ends there.
                stream.seal()
                follower.wait(_PATIENCE_SECONDS)
                counter.join()
            self._look(stream, started, show)
            return Outcome(self.state, prove(stream, self._paths), check_store(store), time.monotonic() - started)

    def _ingest(self, stream: hw.Stream, started: float, show: Callable[[State], None]) -> None:
        """Let the worker run, kill it when its time has come, and start it again, until it ends by itself."""
        is_split = False
        while True:
            with self._process("worker") as worker:
                while worker.poll() is None:
                    self._look(stream, started, show)
                    if time.monotonic() - started > _PATIENCE_SECONDS:
                        raise hw.UnavailableError(
                            f"the demo is not done after {_PATIENCE_SECONDS:.0f} s: {self.state.stored:,} events stored"
                        )
                    if not is_split and self.state.stored >= self.state.expected // 2:
                        is_split = True
                        self._split(stream, started)
                    if self._kill_at and self.state.stored >= self._kill_at[0]:
                        del self._kill_at[0]
                        time.sleep(self._chance.random() * _JITTER_SECONDS)
                        self._kill(worker, started)
                        break
                    time.sleep(_POLL_SECONDS)
                else:
                    if worker.returncode == 0:
                        return
                    said = worker.stderr.read() if worker.stderr is not None else ""
                    raise hw.HeadwaterError(f"the worker ended with {worker.returncode}: {said[-500:]}")

    def _kill(self, worker: subprocess.Popen[str], started: float) -> None:
        worker.kill()
        worker.wait()
        self.state.kills += 1
        self.state.marks.append((time.monotonic() - started, KILL))
        self.state.news.append(f"kill {self.state.kills}: worker {worker.pid} got SIGKILL, with {self.state.stored:,} events stored")

    def _split(self, stream: hw.Stream, started: float) -> None:
        busy = max(stream.segments(), key=lambda segment: segment.events)
        made = stream.split(busy.number)
        self.state.marks.append((time.monotonic() - started, SPLIT))
        numbers = " and ".join(str(segment.number) for segment in made)
        self.state.news.append(f"split: segment {busy.number}, busy with {busy.events:,} events, became {numbers}")

    def _look(self, stream: hw.Stream, started: float, show: Callable[[State], None]) -> None:
        self.state.contents = stream_contents(stream)
        self.state.samples.append((time.monotonic() - started, self.state.stored))
        show(self.state)

    def _listen(self, follower: subprocess.Popen[str]) -> None:
        assert follower.stdout is not None
        for line in follower.stdout:
            counts = json.loads(line)
            self.state.seen, self.state.seen_disordered = counts["seen"], counts["disordered"]

    @contextlib.contextmanager
    def _process(self, role: str) -> Iterator[subprocess.Popen[str]]:
        """A process of the demo, which does not outlive the block, nor this process."""
        arguments = [sys.executable, "-m", f"headwater.cli.demo.{role}", str(self.store_path), STREAM]
        if role == "worker":
            arguments += [str(self.files_path), str(self._events_per_second)]
        # A session of its own: Ctrl-C is for us to handle.
        with subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if role == "follower" else subprocess.DEVNULL,
            stderr=subprocess.PIPE if role == "worker" else None,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
