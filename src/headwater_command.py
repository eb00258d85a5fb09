"""The `headwater` command, before any of it is loaded, which takes some tenths of a second: Ctrl-C ends it as it does later.

It lies beside the package, since importing a module of the package loads all of it.
"""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    # A process started to ignore Ctrl-C still does.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    from headwater.cli import main as run

    run()


def _end(number: int, frame: FrameType | None) -> None:
    # Not by an exception: libraries that are being imported make others of it, or drop it.
    os.write(2, b'{"error": "Interrupted", "message": "interrupted"}\n' if "--json" in sys.argv else b"headwater: interrupted\n")
    os._exit(1)
