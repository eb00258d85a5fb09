"""The time in which one process runs a pipeline: taken by one conditional change of the register, shown by beats, and lost for good.

A successor that finds the beats standing still takes over. From that change on no commit of the former owner succeeds, and the
successor goes on in copies of the checkpoints, so the former owner may go on writing in its own folders, too, and harms nobody.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headwater import ConditionFailedError, FencedError, HeadwaterError, UnavailableError
from headwater.pipelines.checkpoints import copy_checkpoint, last_batch
from headwater.pipelines.durable import make_folder
from headwater.pipelines.register import ANSWER, BEAT, LIVE, Live, Owner, Register, refuse_owner
from headwater.spark.addresses import patiently

_BEAT_SECONDS = 2.0
#: An owner without a beat for that long is taken for dead.
SUSPECTED_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_FORGET_SECONDS = 600.0


class Folders:
    """Where the checkpoints and savepoints of a pipeline are."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self.root = root / pipeline

    def generation(self, output: str, number: int) -> Path:
        return self.root / output / str(number)

    def savepoint(self, name: str) -> Path:
        return self.root / ".savepoints" / name

    def make_generation(self, output: str) -> int:
        """A number that no generation of an output ever had, with an empty folder: two processes never get the same one."""
        folder = self.root / output
        try:
            make_folder(folder)
            number = 1 + max((int(name) for name in os.listdir(folder) if name.isdigit()), default=0)
            while True:
                try:
                    (folder / str(number)).mkdir()
                    return number
                except FileExistsError:
                    number += 1
        except OSError as error:
            raise UnavailableError(f"the checkpoints' folder {folder} can't be written: {error.strerror}") from error

    def drop_old(self, output: str, live: int) -> None:
        """Remove generations before the one before the live one."""
        folder = self.root / output
        numbers = sorted(int(name) for name in os.listdir(folder) if name.isdigit() and int(name) < live)
        for number in numbers[:-1]:
            # The highest numbers stay, so that none is ever used twice.
            shutil.rmtree(folder / str(number), ignore_errors=True)


class Tenure:
    """Runs a pipeline in the name of this process, until it is released or lost."""

    def __init__(self, register: Register, folders: Folders, live: Live) -> None:
        assert live.owner is not None
        self.register = register
        self.folders = folders
        self.owner: Owner = live.owner
        self.live = live
        self.status: Callable[[], Mapping[str, Any]] = dict
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._lost_to = ""
        self._beat()
        self._thread = threading.Thread(target=self._run, name=f"headwater-pipeline-{register.pipeline}", daemon=True)
        self._thread.start()

    @property
    def fence(self) -> tuple[str, int]:
        return self.register.name, self.live.version

    def check(self) -> None:
        """FencedError if another process took over."""
        if not self._lost.is_set():
            with suppress(UnavailableError):
                self._look()
        if self._lost.is_set():
            raise FencedError(
                f"pipeline {self.register.pipeline} was taken over by {self._lost_to}: this process stores nothing more. "
                "If that was wrong, stop the other one and run this again"
            )

    def _look(self) -> None:
        live = self.register.find_live()
        if live is None or live.owner is None or live.owner.id != self.owner.id:
            self._lost_to = str(live.owner) if live is not None and live.owner is not None else "another process, which ended"
            self._lost.set()

    def _run(self) -> None:
        forgotten = time.monotonic()
        while not self._ended.wait(_BEAT_SECONDS) and not self._lost.is_set():
            with suppress(HeadwaterError):
                self._look()
                if not self._lost.is_set():
                    self._beat()
                if time.monotonic() - forgotten > _FORGET_SECONDS:
                    forgotten = time.monotonic()
                    self.register.forget_history()

    def _beat(self) -> None:
        self.register.put(BEAT + self.owner.id, self.status())

    def swap(self, live: Live) -> None:
        """Change the register: from here on commits need the new version. FencedError if another process took over."""
        try:
            self.live = patiently(lambda: self.register.put_live(live))
        except ConditionFailedError:
            # The answer to the same change may have been lost.
            found = self.register.find_live()
            if found is not None and found.owner == live.owner and found.outputs == live.outputs and found.pending == live.pending:
                self.live = found
                return
            self.check()
            raise

    def renumber(self, live: Live) -> None:
        """Note what a transaction with `Register.add_live` has changed."""
        found = self.register.find_live()
        self.live = found if found is not None else live

    def claim(self) -> None:
        """Claim all outputs for the pipeline, at the register's present version."""
        require = (self.register.name, LIVE, self.live.version)
        for generation in self.live.outputs.values():
            stream = self.register.store.stream(generation.target)
            patiently(partial(stream.claim, claimant(self.register.pipeline), require=require))

    def recover(self) -> None:
        """After a former owner that may still be alive: go on in copies of the checkpoints."""
        generations = dict(self.live.outputs)
        look = patiently(lambda: self.register.store.look(markers=[generation.marker for generation in generations.values()]))
        for name, old in generations.items():
            marker = look.markers[old.marker]
            source = self.folders.generation(name, old.number)
            commits = last_batch(source, "commits")
            number = self.folders.make_generation(name)
            # A batch that is stored and of which Spark does not know is run again, and found to be stored. One that is only planned is not.
            offsets = max(commits, marker.sequence if marker is not None else -1)
            copy_checkpoint(source, self.folders.generation(name, number), commits=commits, offsets=offsets, query=old.query)
            generations[name] = replace(old, number=number)
        self.swap(replace(self.live, outputs=generations))
        for name, generation in generations.items():
            self.folders.drop_old(name, generation.number)

    def release(self) -> None:
        """Let others run the pipeline."""
        self._ended.set()
        self._thread.join()
        with suppress(HeadwaterError):
            if not self._lost.is_set():
                self.register.put_live(replace(self.live, owner=None))
            self.register.remove(BEAT + self.owner.id)

    def abandon(self) -> None:
        """End without a word, after an error in the middle of a take-over: whoever comes next begins it again."""
        self._ended.set()
        self._thread.join()


def claimant(pipeline: str) -> str:
    """The owner of a pipeline's claims."""
    return f"pipeline {pipeline}"


def acquire(
    register: Register, folders: Folders, *, waits: bool = False, is_stopped: Callable[[], bool] = lambda: False, command: str
) -> Tenure | None:
    """Take over the pipeline if nobody runs it. Otherwise wait, or raise ConflictError that says to do `command`.

    None if `is_stopped` said so. An owner without a beat for 10 s, or whose process is known to have ended, is taken for dead.
    """
    seen: tuple[str, int | None] | None = None
    since = time.monotonic()
    while not is_stopped():
        live = patiently(register.find_live)
        taken: Live | None = None
        with suppress(ConditionFailedError):  # Another one was faster.
            if live is None:
                taken = register.create(Owner.of_this_process())
            elif live.owner is None or live.owner.is_gone() or time.monotonic() - since > SUSPECTED_SECONDS:
                taken = register.put_live(replace(live, owner=Owner.of_this_process()))
        if taken is not None:
            return _begin(register, folders, taken, live.owner if live is not None else None)
        if live is not None and live.owner is not None:
            beat = live.owner.id, patiently(lambda owner=live.owner: register.beat_version(owner))  # type: ignore[misc]
            if beat != seen:
                if seen is not None and not waits:
                    raise refuse_owner(register.pipeline, live.owner, command)
                seen, since = beat, time.monotonic()
        time.sleep(_LOOK_SECONDS)
    return None


def _begin(register: Register, folders: Folders, live: Live, former: Owner | None) -> Tenure:
    tenure = Tenure(register, folders, live)
    try:
        if former is not None:
            tenure.recover()
            register.remove(BEAT + former.id)
        for id in register.items(ANSWER):
            register.remove(ANSWER + id)
    except BaseException:
        tenure.abandon()
        raise
    return tenure
