"""Checkpoints of Spark, as folders: what a batch's offsets say, and a copy that ends with a chosen batch.

A copy is made while the query runs on, so it is by batch number: offsets and commits up to it, and exactly the state files that
Spark needs to load the state after it. Spark writes each file under another name and renames it, never in place, so a hard link is a
copy. A copy that misses a file is UnavailableError, and nothing of it is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headwater import Cut, InvalidRequestError, UnavailableError

_VERSIONED = re.compile(r"(\d+)\.(zip|changelog)")
_SCHEMA_PATH = re.compile(rb"file:/[^\"]*/state(/\d+/_stateSchema/)")
_DATA_FOLDERS = ("SSTs", "logs")
_METADATA = "metadata"


def last_batch(checkpoint: Path, log: str) -> int:
    """The newest batch in `offsets` or `commits`; -1 if there is none."""
    try:
        names = os.listdir(checkpoint / log)
    except FileNotFoundError:
        return -1
    return max((int(name) for name in names if name.isdigit()), default=-1)


def create(checkpoint: Path, query: str) -> None:
    """Begin an empty checkpoint, for a query of this id."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    _write_query(checkpoint, query)


def _write_query(checkpoint: Path, query: str) -> None:
    (checkpoint / f".{_METADATA}.crc").unlink(missing_ok=True)
    fresh = checkpoint / f".{_METADATA}.{os.getpid()}"
    fresh.write_text(json.dumps({"id": query}), encoding="utf-8")
    fresh.replace(checkpoint / _METADATA)


def read_sources(checkpoint: Path, batch: int) -> list[Cut]:
    """Where each source of a query stands at the end of a batch."""
    found = []
    for line in (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()[2:]:
        if line.startswith("{") and '"streams"' in line:
            found.append(Cut.parse(line))
    return found


def read_settings(checkpoint: Path, batch: int) -> dict[str, str]:
    """The settings of Spark that a query wrote down with a batch: the number of partitions of its state among them."""
    lines = (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = json.loads(lines[1])
    return dict(found.get("conf", {}))


def read_partitions(checkpoint: Path) -> int | None:
    """How many partitions the state has; None before the first batch."""
    batch = last_batch(checkpoint, "offsets")
    return int(read_settings(checkpoint, batch)["spark.sql.shuffle.partitions"]) if batch >= 0 else None


def has_state(checkpoint: Path) -> bool:
    """Whether the query of a checkpoint keeps state."""
    return any((checkpoint / "state").glob("[0-9]*"))


def copy_checkpoint(source: Path, target: Path, *, commits: int, offsets: int | None = None, query: str) -> int:
    """Copy what a query of id `query` needs to go on after batch `commits`; returns the bytes of all files.

    `offsets` may be one more: then that batch is run again, over the same input. UnavailableError if a file is not there (any more).
    """
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    try:
        for log, last in (("offsets", commits if offsets is None else offsets), ("commits", commits)):
            (target / log).mkdir()
            for name in os.listdir(source / log) if (source / log).exists() else ():
                if name.isdigit() and int(name) <= last:
                    _copy(source / log / name, target / log / name)
            if last >= 0 and not (target / log / str(last)).exists():
                raise UnavailableError(f"{source / log} has no batch {last} (any more): repeat the call")
        for folder in ("sources",):
            if (source / folder).exists():
                shutil.copytree(source / folder, target / folder)
        if commits >= 0:
            partitions = int(read_settings(source, commits)["spark.sql.shuffle.partitions"])
            _copy_state(source / "state", target / "state", commits + 1, partitions)
        _write_query(target, query)
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise UnavailableError(f"{source} can't be copied to {target}: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return size_of(target)


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _copy_state(source: Path, target: Path, version: int, partitions: int) -> None:
    """Copy the state as of a version: for each store the newest snapshot up to it, and the changes since."""
    for folder, _, names in os.walk(source):
        place = Path(folder).relative_to(source)
        # A partition past the number is a leftover of a rescale. Data folders are copied by what a snapshot names.
        if (len(place.parts) > 1 and place.parts[1].isdigit() and int(place.parts[1]) >= partitions) or place.name in _DATA_FOLDERS:
            continue
        versioned = {name: found for name in names if (found := _VERSIONED.fullmatch(name)) is not None}
        for name in names:
            if name not in versioned and not name.endswith(".crc") and not name.startswith("."):
                _copy_fact(source / place / name, target / place / name, target)
        if versioned:
            for name in _needed(source / place, versioned, version):
                _copy(source / place / name, target / place / name)


def _needed(folder: Path, versioned: dict[str, re.Match[str]], version: int) -> Iterator[str]:
    snapshots = [int(found[1]) for found in versioned.values() if found[2] == "zip" and int(found[1]) <= version]
    first = max(snapshots, default=0)
    changes = {int(found[1]) for found in versioned.values() if found[2] == "changelog"}
    missing = [number for number in range(first + 1, version + 1) if number not in changes]
    if missing:
        raise UnavailableError(f"{folder} lacks the changes of version {missing[0]} (any more): repeat the call")
    if first:
        # The files that it names were there before it.
        yield from _named_files(folder / f"{first}.zip")
        yield f"{first}.zip"
    yield from (f"{number}.changelog" for number in range(first + 1, version + 1))


def _named_files(snapshot: Path) -> Iterator[str]:
    with zipfile.ZipFile(snapshot) as opened:
        text = opened.read("metadata").decode()
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    for item in found.get("sstFiles") or ():
        yield f"SSTs/{item['dfsSstFileName']}"
    for item in found.get("logFiles") or ():
        yield f"logs/{item['dfsLogFileName']}"


def _copy(source: Path, target: Path) -> None:
    """Copy a file that is never changed in place, and the checksum that Hadoop keeps beside it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _link(source, target)
    for name in (f".{source.name}.crc", f"{source.name}.crc"):
        if (source.parent / name).exists():
            _link(source.parent / name, target.parent / name)


def _copy_fact(source: Path, target: Path, state: Path) -> None:
    """Copy a file of facts about the state. Those of transformWithState name files of their own checkpoint by whole paths."""
    text = source.read_bytes()
    moved = _SCHEMA_PATH.sub(lambda found: b"file:" + os.fsencode(state) + found[1], text)
    if moved == text:
        _copy(source, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(moved)  # Without the checksum beside it, which is that of the old text.


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # Another file system, or one without hard links.
        shutil.copy2(source, target)


def local_folder(place: str) -> Path:
    """The folder that a path or file:// URL names. InvalidRequestError for any other URL."""
    scheme, colon, rest = place.partition("://")
    if not colon:
        return Path(place).absolute()
    if scheme == "file":
        return Path("/" + rest.partition("/")[2])
    raise InvalidRequestError(
        f"checkpoints={place!r}: checkpoints lie in a folder that all who run the pipeline can see (a local or a mounted one), "
        "as savepoints are copies of their files"
    )
