"""Savepoints: copies of all checkpoints as of one look at the store, with the places of all inputs and outputs at that moment.

A savepoint exists once its entry is in the register, which is written last, when all of its files are durable. What its inputs have after
it is kept until it is dropped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from headwater import AlreadyExistsError, ConflictError, Cut, HeadwaterError, NotFoundError, Store, TruncatedError, UnavailableError
from headwater.pipelines.checkpoints import copy_checkpoint, read_sources, size_of
from headwater.pipelines.durable import make_folder, sync_folder, write_durably
from headwater.pipelines.register import SAVEPOINT, Generation, Live, Register
from headwater.pipelines.tenure import Folders

#: Old files of a checkpoint may go while it is copied: then it is copied again, as of a later batch.
_ATTEMPTS = 3
COMPLETE, ABANDONED = "complete", "abandoned"


class Savepoint(NamedTuple):
    """A savepoint: when it was taken, its size on disk, whether it can be restored, and the place up to which inputs were processed."""

    name: str
    taken_at: datetime
    bytes: int
    state: str
    cut: Cut


def list_savepoints(register: Register) -> list[Savepoint]:
    """All savepoints, the oldest first."""
    found = sorted(register.items(SAVEPOINT).items(), key=lambda item: int(item[1]["number"]))
    return [_to_savepoint(name, record) for name, record in found]


def _to_savepoint(name: str, record: Mapping[str, Any]) -> Savepoint:
    taken = datetime.fromisoformat(record["taken_at"])
    return Savepoint(name, taken, record["bytes"], record["state"], Cut.parse(record["cut"]))


def get_record(register: Register, name: str) -> dict[str, Any]:
    """What is known of a savepoint. NotFoundError names those that exist."""
    record = register.find(SAVEPOINT + name)
    if record is None:
        known = ", ".join(savepoint.name for savepoint in list_savepoints(register)) or "none"
        raise NotFoundError(f"pipeline {register.pipeline} has no savepoint {name!r}; its savepoints: {known}")
    return record


def take(register: Register, folders: Folders, live: Live, name: str, finish: Callable[[str, int], None]) -> Savepoint:
    """Take a savepoint of the live generations. `finish(output, batch)` returns when Spark has noted that a stored batch is done.

    On an error nothing of it stays.
    """
    if register.find(SAVEPOINT + name) is not None:
        raise AlreadyExistsError(f"pipeline {register.pipeline} has a savepoint {name!r}: choose another name, or drop that one")
    folder = folders.savepoint(name)
    attempt = 1
    while True:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            return _take(register, folders, live, name, finish)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(HeadwaterError):
                unkeep(register, name)
            if isinstance(error, OSError):
                raise UnavailableError(f"the savepoint {name!r} can't be written to {folder}: {error.strerror or error}") from error
            if not isinstance(error, UnavailableError) or attempt == _ATTEMPTS:
                raise
        attempt += 1


def _take(register: Register, folders: Folders, live: Live, name: str, finish: Callable[[str, int], None]) -> Savepoint:
    store = register.store
    taken = datetime.now(UTC)
    generations = live.outputs
    look = store.look(
        streams=[generation.target for generation in generations.values()],
        markers=[generation.marker for generation in generations.values()],
    )
    outputs: dict[str, Any] = {}
    sources: list[Cut] = []
    for output, generation in generations.items():
        marker = look.markers[generation.marker]
        batch = max(generation.base, marker.sequence if marker is not None else -1)
        checkpoint = folders.generation(output, generation.number)
        read = read_sources(checkpoint, batch) if batch >= 0 else starts_of(generation)
        sources += read
        outputs[output] = {
            "batch": batch,
            "cut": str(Cut(store.id, {generation.target: look.cut.streams[generation.target]})),
            "sources": [str(cut) for cut in read],
            "starts": generation.starts,
            "born": generation.born,
            "definition": generation.definition,
            "target": generation.target,
            "is_table": generation.is_table,
        }
    # Before anything is copied: input that is kept is there when the copy is restored.
    keep(register, name, sources)
    make_folder(folders.savepoint(name))
    for output, generation in generations.items():
        batch = outputs[output]["batch"]
        finish(output, batch)
        checkpoint = folders.generation(output, generation.number)
        copy_checkpoint(checkpoint, folders.savepoint(name) / output, commits=batch, query=generation.query)
    sync_folder(folders.savepoint(name))
    number = 1 + max((int(record["number"]) for record in register.items(SAVEPOINT).values()), default=0)
    record = {
        "number": number,
        "taken_at": taken.isoformat(timespec="milliseconds"),
        "state": COMPLETE,
        "cut": str(_united(store, sources)),
        "pipeline": register.pipeline,
        "outputs": outputs,
        "bytes": 0,
    }
    write_durably(folders.savepoint(name) / "manifest.json", json.dumps(record, indent=1))
    record["bytes"] = size_of(folders.savepoint(name))
    register.put(SAVEPOINT + name, record)
    return _to_savepoint(name, record)


def starts_of(generation: Generation) -> list[Cut]:
    """Where an output begins to read that has no batch yet."""
    return [Cut.parse(text) for _, text in generation.starts]


def drop(register: Register, folders: Folders, name: str) -> None:
    """Forget a savepoint: its input may be truncated from now on, and its files are removed."""
    get_record(register, name)
    register.remove(SAVEPOINT + name)
    unkeep(register, name)
    shutil.rmtree(folders.savepoint(name), ignore_errors=True)


# The input after a savepoint.


def keep(register: Register, name: str, sources: Iterable[Cut]) -> None:
    """Keep the input from these places on. Two sources may stand at two places of one stream, so there may be several keeps."""
    for index, cut in enumerate(_packed(register.store, sources)):
        register.store.keep_from(f"{_prefix(register, name)}{index}", cut)


def unkeep(register: Register, name: str) -> None:
    for kept in register.store.kept():
        if kept.startswith(_prefix(register, name)) and kept.removeprefix(_prefix(register, name)).isdigit():
            register.store.unkeep(kept)


def keep_again(register: Register, name: str, record: Mapping[str, Any]) -> None:
    keep(register, name, [Cut.parse(text) for output in record["outputs"].values() for text in output["sources"]])


def check_input(register: Register, name: str, output: str, saved: Mapping[str, Any]) -> None:
    """ConflictError if the input of an output after a savepoint is gone: its keeps were removed by hand."""
    for cut in map(Cut.parse, saved["sources"]):
        for stream in cut.streams:
            try:
                register.store.stream(stream).ranges(cut)
            except TruncatedError as error:
                raise ConflictError(
                    f"pipeline {register.pipeline}: the input of {output!r} was truncated past the savepoint {name!r}: {error.message}. "
                    "Nothing was changed. Restore another one"
                ) from None


def drop_leftovers(register: Register, folders: Folders) -> None:
    """Remove what a savepoint left behind that was never completed."""
    known = register.items(SAVEPOINT)
    start = f"pipeline.{register.pipeline}."
    for kept in register.store.kept():
        if kept.startswith(start) and kept.removeprefix(start).rpartition(".")[0] not in known:
            register.store.unkeep(kept)
    place = folders.savepoint("x").parent
    for folder in place.iterdir() if place.exists() else ():
        if folder.name not in known:
            shutil.rmtree(folder, ignore_errors=True)


def _prefix(register: Register, name: str) -> str:
    return f"pipeline.{register.pipeline}.{name}."


def _packed(store: Store, sources: Iterable[Cut]) -> list[Cut]:
    """The cuts united to as few as can be: one cut has a stream once."""
    groups: list[dict[str, Any]] = []
    for cut in sources:
        for stream, part in cut.streams.items():
            group = next((group for group in groups if group.get(stream, part) == part), None)
            if group is None:
                groups.append(group := {})
            group[stream] = part
    return [Cut(store.id, group) for group in groups]


def _united(store: Store, sources: Iterable[Cut]) -> Cut:
    """One cut for people: of a stream that several sources read, the place of the one that is behind."""
    found: dict[str, Any] = {}
    for cut in sources:
        for stream, part in cut.streams.items():
            if stream not in found or sorted(part.segments.items()) < sorted(found[stream].segments.items()):
                found[stream] = part
    return Cut(store.id, found)
