"""Named places in the code where a test may kill, stop or delay the process.

`HEADWATER_FAILPOINTS="append.committed=kill@3"` acts at the third pass. Actions: kill (SIGKILL), stop (SIGSTOP), error (an
OSError), sleep:SECONDS. With nothing set, a pass costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

#: Every name that may be armed, in the order in which an append, then the rest, passes them.
NAMES = (
    "append.encoded",
    "append.stored",
    "append.begun",
    "append.applied",
    "append.committed",
    "append.acked",
    "journal.created",
    "journal.written",
    "object.put",
    "replace.renamed",
    "replace.applied",
    "rollback.moved",
    "rollback.applied",
    "scale.applied",
    "scale.committed",
    "truncate.committed",
    "truncate.sliced",
    "txn.begun",
    "txn.stored",
    "txn.inserted",
    "txn.staged",
    "txn.applied",
    "txn.committed",
    "txn.prepared",
    "txn.rolled",
    "txn.dropped",
    "txn.aborted",
    "txn.expired",
    "adopt.applied",
    "adopt.committed",
    "tier.read",
    "tier.written",
    "tier.applied",
    "tier.swapped",
    "tier.sliced",
    "persist.refused",
    "entity.deleted",
    "snapshot.applied",
    "rebuild.sliced",
    "fill.applied",
    "fill.named",
    "fill.sliced",
    "garbage.found",
    "garbage.deleted",
    "garbage.forgotten",
)

_armed: dict[str, list[tuple[str, int]]] = {}
_passes: dict[str, int] = {}
_lock = threading.Lock()


def arm(spec: str) -> None:
    """Arm failpoints from a text like `name=action@pass,name=action`; an empty text disarms all."""
    armed: dict[str, list[tuple[str, int]]] = {}
    for item in filter(None, spec.split(",")):
        name, _, rest = item.partition("=")
        action, _, at = rest.partition("@")
        if name not in NAMES:
            raise ValueError(f"no failpoint is called {name!r}; there are: {', '.join(NAMES)}")
        armed.setdefault(name, []).append((action, int(at or 1)))
    with _lock:
        _passes.clear()
        _armed.clear()
        _armed.update(armed)


def reach(name: str) -> None:
    """Pass the failpoint `name`, doing what was armed for this pass."""
    if name in _armed:
        _act(name)


def _act(name: str) -> None:
    with _lock:
        _passes[name] = _passes.get(name, 0) + 1
        actions = [action for action, at in _armed.get(name, ()) if at == _passes[name]]
    for action in actions:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            # To this thread, which then stops here: one to the process may be taken by another thread, while this one goes on for a while.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        elif action == "error":
            raise OSError(errno.EIO, f"failpoint {name}")
        elif action.startswith("sleep:"):
            time.sleep(float(action.removeprefix("sleep:")))
        else:
            raise ValueError(f"failpoint {name}: no action is called {action!r}")


arm(os.environ.get("HEADWATER_FAILPOINTS", ""))
