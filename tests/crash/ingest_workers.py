"""What the processes of the ingestion tests do."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any

import headwater as hw
from headwater import contents
from headwater.ingest import ingest
from headwater.runtime import failpoints
from tests.crash.processes import Place


def ingest_folder(channel: Connection, place: Place, spec: str, folder: str, stream: str, options: dict[str, Any]) -> None:
    """Ingest a folder, and go through the failpoints in `spec` on the way; say how it ended.

    Two more options than `ingest` has: `stage_bytes`, after which a transaction is staged, and `seconds`, which each piece takes.
    """
    failpoints.arm(spec)
    contents.STAGE_BYTES = options.pop("stage_bytes", contents.STAGE_BYTES)
    least = options.pop("seconds", 0.0)
    with place.open() as store:
        channel.send("begun")
        try:
            report = ingest(store, folder, stream, pause=lambda seconds: time.sleep(max(seconds, least)), **options)
        except hw.HeadwaterError as error:
            channel.send((type(error).__name__, str(error)))
        else:
            channel.send(("done", report.events))
