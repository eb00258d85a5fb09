"""Ending with the demo, however it ends: its processes have their standard input from it, which closes then.

`python -m headwater.cli.demo.orphans ARGUMENTS...` is the command line, ended so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from headwater.cli import main


def end_with_parent() -> None:
    """End this process, and what it started, when the one that started it is gone."""

    def wait() -> None:
        sys.stdin.read()
        if os.getpgid(0) == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    main()
