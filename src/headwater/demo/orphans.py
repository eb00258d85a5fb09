"""Ending with the demo, however it ends: its processes have their standard input from it, which closes then.

`python -m headwater.demo.orphans ARGUMENTS...` is the command line, ended so.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading

from headwater.cli import main


def end_with_parent() -> queue.SimpleQueue[str]:
    """End this process and its children when the parent process is gone. The queue gets the lines that the parent sends."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait() -> None:
        for line in sys.stdin:
            lines.put(line.strip())
        if os.getpgid(0) == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    return lines


if __name__ == "__main__":
    end_with_parent()
    main()
