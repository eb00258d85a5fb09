"""Refusing to put a SQLite catalog on a network file system, whose locks can't be trusted."""

from __future__ import annotations

import os
import re

from headwater.errors import InvalidRequestError

_NETWORK = {
    "9p",
    "afp",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "coda",
    "davfs",
    "gfs",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "pvfs2",
    "smb2",
    "smb3",
    "smbfs",
}
_FUSE = {"davfs", "ceph", "cephfs", "gcsfuse", "glusterfs", "goofys", "juicefs", "rclone", "s3fs", "sshfs", "smbnetfs"}

#: Spaces, tabs, line feeds and backslashes; all other characters are as they are.
_ESCAPED = re.compile(r"\\([0-7]{3})")


def refuse_network_mount(path: str, mounts: str | None = None) -> None:
    """InvalidRequestError if `path` lies on a network file system. `mounts` is the text of /proc/self/mounts, where there is one."""
    if mounts is None:
        try:
            with open("/proc/self/mounts", "rb") as file:
                mounts = os.fsdecode(file.read())
        except OSError:
            return
    try:
        kind = file_system_of(os.path.realpath(path), mounts)
    except ValueError:
        return  # No path at all: whoever uses it says so.
    if kind is not None and (kind in _NETWORK or kind.removeprefix("fuse.") in _FUSE):
        raise InvalidRequestError(
            f"{path} is on a network file system ({kind}), where SQLite's locks can't be trusted: "
            "use a local directory, or a catalog on PostgreSQL (catalog='postgresql://...')"
        )


def file_system_of(path: str, mounts: str) -> str | None:
    """The type of the file system that a path is on: the last mount whose folder holds it, the deepest one winning."""
    best, kind = "", None
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        folder = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[1])
        if (path == folder or path.startswith(folder.rstrip("/") + "/")) and len(folder) >= len(best):
            best, kind = folder, fields[2]
    return kind
