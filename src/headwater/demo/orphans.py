"""Ending with the demo, however it ends: its processes have their standard input from it, which closes then.

`python -m headwater.demo.orphans ARGUMENTS...` is the command line, ended so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from headwater.cli import main


def end_with_parent() -> threading.Event:
    """End this process, and what it started, when the one that started it is gone. The event says that it sent a line."""
    told = threading.Event()

    def wait() -> None:
        for _ in sys.stdin:
            told.set()
        if os.getpgid(0) == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    return told


if __name__ == "__main__":
    end_with_parent()
    main()
