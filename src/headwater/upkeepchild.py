"""The process of `hw.open(upkeep="process")`: it does a store's upkeep until its input ends, which is when its parent closed or died."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
import time
from dataclasses import asdict

import headwater as hw

_LOOK_SECONDS = 1.0
_NOTED_SECONDS = 0.02
_NICE = 10
#: A step under way may take this long after the parent is gone.
_LAST_SECONDS = 8.0


def main(url: str, catalog: str | None, storage_options: dict[str, str] | None) -> None:
    """Do what is due and print a report of each round that did something, a line of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whoever waits for the parent goes first.
    os.nice(_NICE)
    # The parent logs the problems of each report.
    logging.getLogger("headwater").addHandler(logging.NullHandler())
    try:
        with hw.open(url, catalog=catalog, create=False, upkeep=False, storage_options=storage_options) as store:
            threading.Thread(target=_end_with_parent, args=(store, os.getppid()), daemon=True).start()
            threading.Thread(target=_note_writers, args=(store,), daemon=True).start()
            for report in store.upkeep_rounds():
                if report is not None and asdict(report) != asdict(hw.UpkeepReport(seconds=report.seconds)):
                    print(json.dumps(asdict(report)), flush=True)
    except BrokenPipeError:
        os._exit(0)  # The parent is gone, and with it whoever could be told.
    except hw.HeadwaterError as error:
        print(json.dumps({"problems": [f"the upkeep's process ends: {error}"]}), flush=True)
        sys.exit(1)


def _note_writers(store: hw.Store) -> None:
    """Let upkeep leave room for the writers of other processes: their commits are seen, as followers see them."""
    engine = store._engine
    while not engine.is_closed:
        seen = engine.changes.version()
        engine.changes.wait(seen, _LOOK_SECONDS)
        if engine.changes.version() != seen:
            engine.pace.note()
        time.sleep(_NOTED_SECONDS)


def _end_with_parent(store: hw.Store, parent: int) -> None:
    """End the rounds when the input ends, or when another process is this one's parent: a fork of the parent may hold the input open."""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], _LOOK_SECONDS)
        if ready and not os.read(0, 1024):
            break
    last = threading.Timer(_LAST_SECONDS, os._exit, (1,))
    last.daemon = True
    last.start()
    store._upkeep.stop()
