"""What is done to a pipeline while no query runs: restore, rescale, and letting a query finish its last batch."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pyspark.sql import SparkSession

from headwater import ConflictError, Cut, HeadwaterError, InvalidRequestError, Store, UnavailableError
from headwater.pipelines import checkpoints, savepoints
from headwater.pipelines.checkpoints import copy_checkpoint, last_batch
from headwater.pipelines.definitions import is_stateful
from headwater.pipelines.graph import Graph
from headwater.pipelines.preparing import check_definition
from headwater.pipelines.queries import build, build_all, start_query
from headwater.pipelines.register import LIVE, SAVEPOINT, Generation, encode
from headwater.pipelines.rollback import add_roll_back
from headwater.pipelines.sessions import can_repartition, repartition
from headwater.pipelines.supervisor import describe_error
from headwater.pipelines.tenure import Tenure

ROLL_BACK, APPEND = "roll_back", "append"
#: Stateful operators that Spark's repartition refuses; it takes all others.
_INDIVISIBLE = {"limit"}


def finish_batch(tenure: Tenure, session: Callable[[], SparkSession], store: Store, graph: Graph, name: str) -> None:
    """Let a query run its last batch again, if that is stored and Spark does not know. UnavailableError if the query can't."""
    generation = tenure.live.outputs[name]
    checkpoint = tenure.folders.generation(name, generation.number)
    marker = store.look(markers=[generation.marker]).markers[generation.marker]
    if marker is None or last_batch(checkpoint, "commits") >= marker.sequence:
        return
    output = graph.get_output(name)
    built = build(session(), store, graph, output, starts=generation.starts)
    check_definition(graph.pipeline, output, _facts(generation), built.definition, "its checkpoint")
    tenure.claim()
    try:
        query = start_query(output, built, store, checkpoint, tenure.fence, output.partitions, until="batch")
        query.awaitTermination()
    except Exception as error:
        reason = describe_error(error).reason
        raise UnavailableError(
            f"pipeline {graph.pipeline}: the output {name!r} can't finish its last batch, {marker.sequence}: {reason}"
        ) from None
    if last_batch(checkpoint, "commits") < marker.sequence:
        raise UnavailableError(f"pipeline {graph.pipeline}: the output {name!r} did not finish its last batch, {marker.sequence}")


def _facts(generation: Generation) -> dict[str, Any]:
    return {"definition": generation.definition, "target": generation.target, "is_table": generation.is_table}


# Restore.


def check_restore(tenure: Tenure, spark: SparkSession, store: Store, graph: Graph, name: str) -> None:
    """Refuse a savepoint that is unknown, abandoned, or of other definitions."""
    record = savepoints.get_record(tenure.register, name)
    if record["state"] != savepoints.COMPLETE:
        raise ConflictError(
            f"pipeline {graph.pipeline}: the savepoint {name!r} was abandoned when an earlier one was restored: "
            "its outputs were rolled back. "
            "Restore another one"
        )
    if not tenure.folders.savepoint(name).exists():
        raise ConflictError(f"pipeline {graph.pipeline}: the files of savepoint {name!r} are gone from {tenure.folders.savepoint(name)}")
    built = build_all(spark, store, graph, tenure.live.outputs, None)
    for output in graph.outputs.values():
        if output.name in record["outputs"]:
            saved = record["outputs"][output.name]
            check_definition(graph.pipeline, output, saved, built[output.name].definition, f"the savepoint {name!r}")
            savepoints.check_input(tenure.register, name, output.name, saved)


def restore(tenure: Tenure, spark: SparkSession, store: Store, graph: Graph, name: str, mode: str) -> None:
    """Make all outputs go on from a savepoint. Once it is begun, whoever runs the pipeline next completes it."""
    check_restore(tenure, spark, store, graph, name)
    tenure.swap(replace(tenure.live, pending={"savepoint": name, "outputs": mode}))
    complete_restore(tenure, store)


def complete_restore(tenure: Tenure, store: Store) -> None:
    """Do what a restore has begun; nothing if none was. All outputs and checkpoints change in one commit."""
    pending = tenure.live.pending
    if pending is None:
        return
    register, name = tenure.register, pending["savepoint"]
    record = savepoints.get_record(register, name)
    rolls_back = pending["outputs"] == ROLL_BACK
    later = {
        other: found
        for other, found in register.items(SAVEPOINT).items()
        if rolls_back and found["number"] > record["number"] and found["state"] == savepoints.COMPLETE
    }
    made: list[tuple[str, int]] = []
    # They are at the version of the last run.
    tenure.claim()
    try:
        for other in later:
            # What they keep lies past the cut, and would refuse the roll-back.
            savepoints.unkeep(register, other)
        generations, cuts = _restored(tenure, name, record, rolls_back, made)
        live = replace(tenure.live, outputs=generations, pending=None)
        with store.transaction() as tx:
            # The outputs are claimed: only who has the register's entry may change them.
            tx.require(register.name, LIVE, tenure.live.version)
            for target, (cut, keep_as) in cuts.items():
                add_roll_back(tx, store, target, cut, keep_as)
            for other, found in later.items():
                tx.put(register.name, SAVEPOINT + other, encode({**found, "state": savepoints.ABANDONED}))
            register.add_live(tx, live)
    except UnavailableError:
        raise  # It goes on when the pipeline is run again.
    except HeadwaterError:
        for output, number in made:
            shutil.rmtree(tenure.folders.generation(output, number), ignore_errors=True)
        tenure.check()
        for other, found in later.items():
            with suppress(HeadwaterError):
                savepoints.keep_again(register, other, found)
        tenure.swap(replace(tenure.live, pending=None))
        raise
    tenure.renumber(live)
    for output, generation in generations.items():
        tenure.folders.drop_old(output, generation.number)


def _restored(
    tenure: Tenure, name: str, record: Mapping[str, Any], rolls_back: bool, made: list[tuple[str, int]]
) -> tuple[dict[str, Generation], dict[str, tuple[Cut, str]]]:
    """The generations as of a savepoint; the cut to which each output is rolled back, and the name of what it was."""
    generations: dict[str, Generation] = {}
    cuts: dict[str, tuple[Cut, str]] = {}
    for output, saved in record["outputs"].items():
        number = tenure.folders.make_generation(output)
        made.append((output, number))
        query = str(uuid.uuid4())
        folder = tenure.folders.generation(output, number)
        copy_checkpoint(tenure.folders.savepoint(name) / output, folder, commits=saved["batch"], query=query)
        generations[output] = Generation(
            number=number,
            query=query,
            base=saved["batch"],
            starts=saved["starts"],
            born=saved["born"],
            definition=saved["definition"],
            target=saved["target"],
            is_table=saved["is_table"],
        )
        cuts[saved["target"]] = Cut.parse(saved["cut"]), f"{saved['target']}.undone-{number}"
    for output, generation in tenure.live.outputs.items():
        if output in generations:
            continue
        if not rolls_back:
            generations[output] = generation
            continue
        # It was made after the savepoint: it begins anew.
        number = tenure.folders.make_generation(output)
        made.append((output, number))
        query = str(uuid.uuid4())
        checkpoints.create(tenure.folders.generation(output, number), query)
        generations[output] = replace(generation, number=number, query=query, base=-1)
        cuts[generation.target] = Cut.parse(generation.born), f"{generation.target}.undone-{number}"
    return generations, cuts if rolls_back else {}


# Rescale.


def check_rescale(tenure: Tenure, spark: SparkSession, graph: Graph, only: str | None) -> None:
    """Refuse a rescale of state that Spark can't divide, while queries may be running."""
    if not can_repartition(spark):
        repartition(spark, "", 1)  # It says why not.
    for name in _choose(tenure, graph, only):
        for operator in (node["operator"] for node in tenure.live.outputs[name].definition["stateful"]):
            if operator in _INDIVISIBLE:
                raise InvalidRequestError(
                    f"pipeline {graph.pipeline}: {name!r} keeps a {operator}, whose state can't be divided, so nothing was changed: name "
                    "another output, with output= or --output"
                )


def rescale(tenure: Tenure, spark: SparkSession, store: Store, graph: Graph, partitions: int, only: str | None) -> dict[str, int]:
    """Divide the state of outputs into another number of partitions. On an error all is as it was. Returns what each has now."""
    check_rescale(tenure, spark, graph, only)
    chosen = _choose(tenure, graph, only)
    generations = dict(tenure.live.outputs)
    made: list[tuple[str, int]] = []
    try:
        for name in chosen:
            finish_batch(tenure, lambda: spark, store, graph, name)
            old = tenure.live.outputs[name]
            source = tenure.folders.generation(name, old.number)
            number = tenure.folders.make_generation(name)
            made.append((name, number))
            folder, query = tenure.folders.generation(name, number), str(uuid.uuid4())
            commits = last_batch(source, "commits")
            copy_checkpoint(source, folder, commits=commits, query=query)
            if checkpoints.read_partitions(folder) != partitions:
                _repartition(spark, graph, name, str(folder), partitions)
            generations[name] = replace(old, number=number, query=query, base=last_batch(folder, "commits"))
        tenure.swap(replace(tenure.live, outputs=generations))
    except BaseException:
        for name, number in made:
            shutil.rmtree(tenure.folders.generation(name, number), ignore_errors=True)
        raise
    for name in chosen:
        tenure.folders.drop_old(name, generations[name].number)
    return dict.fromkeys(chosen, partitions)


def _choose(tenure: Tenure, graph: Graph, only: str | None) -> list[str]:
    """The outputs with state to divide; InvalidRequestError if the one that was named has none, or there is none at all."""
    live = tenure.live.outputs
    if only is not None:
        graph.get_output(only)
        if only not in live or not is_stateful(live[only].definition):
            what = "keeps no state" if only in live else "has not run yet"
            raise InvalidRequestError(f"pipeline {graph.pipeline}: the output {only!r} {what}, so there is nothing to divide anew")
    names = [only] if only is not None else [name for name in live if name in graph.outputs and is_stateful(live[name].definition)]
    chosen = [name for name in names if last_batch(tenure.folders.generation(name, live[name].number), "offsets") >= 0]
    if not chosen:
        raise InvalidRequestError(
            f"pipeline {graph.pipeline} has no output with state yet: give partitions= in @p.stream or @p.table, "
            "which counts for new outputs"
        )
    return chosen


def _repartition(spark: SparkSession, graph: Graph, name: str, folder: str, partitions: int) -> None:
    try:
        repartition(spark, folder, partitions)
    except HeadwaterError:
        raise
    except Exception as error:
        reason = describe_error(error).reason
        raise InvalidRequestError(
            f"pipeline {graph.pipeline}: Spark can't divide the state of {name!r} into {partitions} partitions: {reason}. "
            f"Nothing was changed. An output under a new name, with partitions={partitions}, is filled from the head"
        ) from None
