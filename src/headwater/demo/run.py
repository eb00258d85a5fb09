"""Running the demo: a store, what fills it, what drains it, the kills, and the split in the middle."""

from __future__ import annotations

import importlib.util
import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

import headwater as hw
from headwater.check import CheckReport, StreamContents, check_store, stream_contents
from headwater.demo.chart import Mark, Sample
from headwater.demo.delivery import Delivery
from headwater.demo.files import LIMITS, SCHEMA, SCHEMA_TEXT, make_files
from headwater.demo.mistake import Mistake
from headwater.demo.pipeline import ENRICHED, READINGS, WINDOWS, find_owner
from headwater.demo.processes import DemoProcess, module_command
from headwater.demo.proof import Proof, WindowProof, prove, prove_enriched, prove_windows

KILL, DRIVER_KILL, SPLIT = "✗", "◆", "┿"
_SEGMENTS = 2
_EVENTS_PER_TRANSACTION = 100
_POLL_SECONDS, _IDLE_SECONDS = 0.02, 0.05
_WINDOWS_SECONDS = 0.5
#: Fewer readings than this may all be right although the pipeline is wrong.
_MISTAKE_EVENTS = 50
#: A kill comes up to so long after the event that it was to follow: anywhere in a transaction.
_JITTER_SECONDS, _DRIVER_JITTER_SECONDS = 0.03, 1.0
_PATIENCE_SECONDS = 300.0


def has_spark() -> bool:
    return importlib.util.find_spec("pyspark") is not None


@dataclass
class State:
    """What is to be seen of a run."""

    expected: int
    contents: StreamContents | None = None
    kills: int = 0
    driver_kills: int = 0
    #: Windows that the wrong version of the pipeline stored, before the restore.
    wrong_windows: int = 0
    restores: int = 0
    seen: int = 0
    seen_disordered: int = 0
    enriched: int = 0
    counted: int = 0
    samples: list[Sample] = field(default_factory=list)
    enriched_samples: list[Sample] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    news: list[str] = field(default_factory=list)

    @property
    def stored(self) -> int:
        return self.contents.events if self.contents is not None else 0


@dataclass(frozen=True)
class Outcome:
    """How a run ended. Without Spark there are no `enriched` and `windows`."""

    state: State
    proof: Proof
    enriched: Proof | None
    windows: WindowProof | None
    report: CheckReport
    seconds: float

    @property
    def holds(self) -> bool:
        followed = self.state.seen == self.proof.expected and not self.state.seen_disordered
        stages = (self.enriched is None or self.enriched.holds) and (self.windows is None or self.windows.holds)
        return self.proof.holds and self.report.ok and followed and stages


class Demo:
    """One run in a folder of its own: `files` is where files arrive, `store` the store, unless that is elsewhere."""

    def __init__(
        self,
        folder: Path,
        *,
        files: int,
        events: int,
        kills: int,
        seed: int,
        events_per_second: float,
        spark: bool,
        store: Path | None = None,
    ) -> None:
        self.folder = folder
        self.store_path = store or folder / "store"
        self.files_path = folder / "files"
        self.chart_path = folder / "chart.png"
        self._checkpoints = folder / "checkpoints"
        self._drivers: list[DemoProcess] = []
        self._files, self._events = files, events
        self.state = State(files * events)
        self.spark = spark
        self._chance = random.Random(seed)
        waiting = make_files(folder / "waiting", files=files, events=events, seed=seed)
        self._delivery = Delivery(waiting, self.files_path, events_per_second / events)
        # Those that come last stand in windows that stay open.
        self._uncounted = min(len(LIMITS), events - 1)
        total = self.state.expected
        # Before the last file, which comes when all is killed that shall be: so there is always something left to do.
        self._kill_at = sorted(self._chance.randrange(total // 20, max((files - 1) * events, total // 20 + 1)) for _ in range(kills))
        # When the readings' first half went through it, and the second is on its way.
        self._driver_kill_at = self._chance.randrange(1, total // 2) if spark and kills else None
        self._mistake: Mistake | None = None
        self._makes_mistake = spark and files > 1 and events >= _MISTAKE_EVENTS
        self._is_split = False
        self._windows_at = 0.0
        self._began = 0.0

    def run(self, show: Callable[[State], None]) -> Outcome:
        """Do it all; `show` is called many times a second."""
        self._began = time.monotonic()
        with hw.open(self.store_path) as store:
            stream = store.create_stream(READINGS, schema=SCHEMA, scaling=hw.Scaling.fixed(_SEGMENTS))
            with (
                self._follower() as follower,
                self._ingester() as ingester,
                self._driver() as driver,
                self._driver() as standby,
            ):
                follower.start()
                threading.Thread(target=self._listen, args=(follower,), daemon=True).start()
                ingester.start()
                if self.spark:
                    self._create_enriched(store)
                    # Whichever is up first runs the pipeline.
                    self._drivers = [driver, standby] if self._driver_kill_at is not None else [driver]
                    for process in self._drivers:
                        process.start()
                try:
                    self._loop(store, stream, ingester, show)
                finally:
                    if self._mistake is not None:
                        self._mistake.end()
                ingester.stop()
                # The follower reads on to the end of a sealed stream, and ends there.
                stream.seal()
                follower.wait(_PATIENCE_SECONDS)
            self._look(store, stream)
            show(self.state)
            return self._outcome(store, stream)

    def _loop(self, store: hw.Store, stream: hw.Stream, ingester: DemoProcess, show: Callable[[State], None]) -> None:
        stored = 0
        while not self._is_done():
            self._look(store, stream)
            show(self.state)
            self._delivery.deliver(time.monotonic() - self._began, most=self._files_wanted())
            self._disturb(store, stream, ingester)
            # While only Spark works, it may have the processor.
            time.sleep(_POLL_SECONDS if self.state.stored > stored else _IDLE_SECONDS)
            stored = self.state.stored

    def _files_wanted(self) -> int:
        """How many files may be there by now, so that whoever is killed has something left to do."""
        most = self._files
        if self._kill_at:
            most = max(1, min(most - 1, self._kill_at[0] // self._events + 3))
        if self.spark and not self._is_at_work():
            most = min(most, (self._files + 1) // 2)
        return most

    def _is_at_work(self) -> bool:
        """Whether the second half of the files may come: the pipeline runs, in its wrong version if there is to be one."""
        if self._makes_mistake:
            return self._mistake is not None and self._mistake.is_deployed
        return self.state.enriched > 0

    def _ingester(self) -> DemoProcess:
        options = ["--key", "sensor", "--time", "at", "--schema", SCHEMA_TEXT, "--events-per-transaction", str(_EVENTS_PER_TRANSACTION)]
        watch = ["--watch", "--settle", "0", "--json"]
        command = module_command(
            "orphans", "ingest", str(self.files_path), "--stream", READINGS, *options, *watch, "--store", str(self.store_path)
        )
        return DemoProcess("the ingester", command, self.folder / "ingester.log")

    def _follower(self) -> DemoProcess:
        return DemoProcess("the follower", module_command("follower", str(self.store_path), READINGS), None)

    def _driver(self) -> DemoProcess:
        command = module_command("pipeline", str(self.store_path), str(self._checkpoints))
        return DemoProcess("the Spark driver", command, self.folder / "pipeline.log")

    def _create_enriched(self, store: hw.Store) -> None:
        """Made before the pipeline is up, so that it can be looked at."""
        fields = [pa.field(field.name, field.type) for field in SCHEMA]
        store.create_stream(ENRICHED, schema=pa.schema([*fields, ("site", pa.string()), ("hot", pa.bool_())]))

    def _is_done(self) -> bool:
        state = self.state
        if time.monotonic() - self._began > _PATIENCE_SECONDS:
            raise hw.UnavailableError(
                f"the demo is not done after {_PATIENCE_SECONDS:.0f} s: {state.stored:,} events stored; see {self.folder}"
            )
        is_read = not self.spark or (state.enriched >= state.expected and state.counted >= state.expected - self._uncounted)
        is_right = not self._makes_mistake or (self._mistake is not None and self._mistake.is_over)
        return is_right and state.stored >= state.expected and is_read

    def _look(self, store: hw.Store, stream: hw.Stream) -> None:
        state, now = self.state, time.monotonic() - self._began
        state.contents = stream_contents(stream)
        state.samples.append((now, state.stored))
        if self.spark:
            state.enriched = stream_contents(store.stream(ENRICHED)).events
            state.enriched_samples.append((now, state.enriched))
            if now >= self._windows_at and WINDOWS in store.streams():
                self._windows_at = now + _WINDOWS_SECONDS
                with suppress(hw.RolledBackError):  # The restore came in the middle: it is counted next time.
                    state.counted = sum(event.value["readings"] for event in store.stream(WINDOWS).read())

    def _disturb(self, store: hw.Store, stream: hw.Stream, ingester: DemoProcess) -> None:
        """Kill, split and deploy when it is time, and start again what was killed."""
        state = self.state
        if not self._is_split and state.stored >= state.expected // 2:
            self._is_split = True
            self._split(stream)
        if self._kill_at and state.stored >= self._kill_at[0]:
            del self._kill_at[0]
            time.sleep(self._chance.random() * _JITTER_SECONDS)
            state.kills += 1
            self._note(
                KILL, f"kill {state.kills}: the ingester, process {ingester.kill()}, got SIGKILL, with {state.stored:,} events stored"
            )
            ingester.start()
        if self._driver_kill_at is not None and state.enriched >= self._driver_kill_at:
            self._driver_kill_at = None
            time.sleep(self._chance.random() * _DRIVER_JITTER_SECONDS)
            self._kill_driver(store)
        if self._makes_mistake and self._mistake is None and self._driver_kill_at is None and state.enriched >= state.expected // 2:
            self._mistake = Mistake(store, self._checkpoints, self._delivery.arrived, self._drivers[0].tell, self._note)
        if self._mistake is not None:
            state.wrong_windows, state.restores = self._mistake.wrong, int(self._mistake.is_over)
        for process in (ingester, *self._drivers):
            process.check()

    def _kill_driver(self, store: hw.Store) -> None:
        state, owner = self.state, find_owner(store)
        driver = next(process for process in self._drivers if process.pid == owner)
        self._drivers.remove(driver)
        state.driver_kills += 1
        self._note(
            DRIVER_KILL,
            f"kill: the Spark driver, process {driver.kill()}, got SIGKILL, with {state.enriched:,} events read; a standby takes over",
        )

    def _split(self, stream: hw.Stream) -> None:
        busy = max(stream.segments(), key=lambda segment: segment.events)
        numbers = " and ".join(str(segment.number) for segment in stream.split(busy.number))
        self._note(SPLIT, f"split: segment {busy.number}, busy with {busy.events:,} events, became {numbers}")

    def _note(self, letter: str, text: str) -> None:
        self.state.marks.append((time.monotonic() - self._began, letter))
        self.state.news.append(text)

    def _listen(self, follower: DemoProcess) -> None:
        for line in follower.lines():
            counts = json.loads(line)
            self.state.seen, self.state.seen_disordered = counts["seen"], counts["disordered"]

    def _outcome(self, store: hw.Store, stream: hw.Stream) -> Outcome:
        proof = prove(stream, self._delivery.arrived)
        enriched = prove_enriched(store.stream(ENRICHED), self._delivery.arrived) if self.spark else None
        windows = prove_windows(store.stream(WINDOWS), self._delivery.arrived) if self.spark else None
        return Outcome(self.state, proof, enriched, windows, check_store(store), time.monotonic() - self._began)
