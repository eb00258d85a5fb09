"""A process that kills itself at a step of a command of the pipeline `sales`.

    python -m tests.spark.pipeline_steps FOLDER STEP take|savepoint|restore|rescale|run

STEP is module.function@n of headwater.pipelines or headwater.spark: SIGKILL comes when its n-th call has returned, with "<" instead of "@"
when it begins.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

FOLDER, STEP, COMMAND = sys.argv[1:4]


def arm(step: str) -> None:
    """Wrap a function wherever the package has it."""
    before = "<" in step
    place, _, count = step.partition("<" if before else "@")
    module, _, name = place.partition(".")
    package = "pipelines" if importlib.util.find_spec(f"headwater.pipelines.{module}") is not None else "spark"
    owner: Any = importlib.import_module(f"headwater.{package}.{module}")
    *path, name = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, left = getattr(owner, name), [int(count)]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if before and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*arguments, **options)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, wrapped)


def main() -> None:
    import headwater as hw
    from headwater.pipelines.runner import Runner
    from tests.spark.sales_job import declare

    arm(STEP)
    folder = Path(FOLDER)
    session = None
    if COMMAND in ("restore", "rescale", "run"):
        import headwater.spark
        from headwater.pipelines.sessions import SETTINGS
        from tests.spark.pipelines import FAST

        settings = {**FAST, **{name.replace(".", "__"): value for name, value in SETTINGS.items()}}
        session = headwater.spark.session("steps", master="local[2,3]", **settings)
        session.sparkContext.setLogLevel("OFF")
    pipeline = declare(hw.open(folder / "store", create=False, upkeep=False), folder, session)
    if COMMAND == "take":
        runner = Runner(pipeline._register, pipeline._folders, pipeline._graph, pipeline._session, waits=True)
        runner.take("")
    elif COMMAND == "savepoint":
        pipeline.savepoint("killed")
    elif COMMAND == "restore":
        pipeline.restore("first")
    elif COMMAND == "run":
        pipeline.run(until="caught_up")
    else:
        pipeline.rescale(4)


if __name__ == "__main__":
    main()
