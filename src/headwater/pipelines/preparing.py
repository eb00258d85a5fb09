"""What is done before the queries start: missing outputs are made, definitions compared, and outputs claimed."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyspark.sql import SparkSession

from headwater import ConflictError, InvalidRequestError, Store
from headwater.pipelines import checkpoints
from headwater.pipelines.definitions import differences
from headwater.pipelines.errors import IncompatibleError
from headwater.pipelines.graph import Graph, Output
from headwater.pipelines.queries import Built, build_all, make_target
from headwater.pipelines.register import Generation
from headwater.pipelines.tenure import Tenure, claimant


def prepare(tenure: Tenure, spark: SparkSession, store: Store, graph: Graph) -> dict[str, Built]:
    """Build all outputs, give each new one a generation, and claim them. IncompatibleError before anything has changed but streams."""
    generations = dict(tenure.live.outputs)
    # Compared first: nothing is made for a pipeline that is refused.
    built = build_all(spark, store, graph, generations, None)
    check_definitions(graph, generations, built)
    known_names = {*store.streams(), *store.tables()}
    if all(output.target in known_names for output in graph.outputs.values()):
        for name, found in built.items():
            make_target(store, graph.outputs[name], found.df)
    else:
        # DataFrames that read what is only planned are built again on what is made.
        built = build_all(spark, store, graph, generations, lambda output, found: make_target(store, output, found.df))
    for output in graph.outputs.values():
        found, known = built[output.name], generations.get(output.name)
        if known is None:
            generations[output.name] = _begin(tenure, store, output, found)
        elif known.definition != found.definition:
            generations[output.name] = replace(known, definition=found.definition)
    if generations != tenure.live.outputs:
        tenure.swap(replace(tenure.live, outputs=generations))
    tenure.claim()
    return built


def _begin(tenure: Tenure, store: Store, output: Output, built: Built) -> Generation:
    number = tenure.folders.make_generation(output.name)
    query = str(uuid.uuid4())
    checkpoints.create(tenure.folders.generation(output.name, number), query)
    return Generation(
        number=number,
        query=query,
        base=-1,
        starts=built.starts,
        born=str(store.stream(output.target).tail()),
        definition=built.definition,
        target=output.target,
        is_table=output.is_table,
    )


def check_definitions(graph: Graph, generations: Mapping[str, Generation], built: Mapping[str, Built]) -> None:
    """IncompatibleError if an output can't go on from its checkpoint; it names what changed."""
    for output in graph.outputs.values():
        known = generations.get(output.name)
        if known is not None:
            facts: dict[str, Any] = {"target": known.target, "is_table": known.is_table, "definition": known.definition}
            check_definition(graph.pipeline, output, facts, built[output.name].definition, "its checkpoint")


def check_definition(pipeline: str, output: Output, known: Mapping[str, Any], definition: Mapping[str, Any], what: str) -> None:
    """IncompatibleError if an output's query is not the one that wrote a checkpoint or savepoint."""
    found = differences(known["definition"], definition)
    if (known["target"], known["is_table"]) != (output.target, output.is_table):
        kinds = {True: "the table", False: "the stream"}
        found.append(f"it fills {kinds[output.is_table]} {output.target}, and filled {kinds[known['is_table']]} {known['target']}")
    if found:
        raise IncompatibleError(
            f"pipeline {pipeline}: the output {output.name!r} does not fit {what}: {'; '.join(found)}. Nothing was started. "
            "Run the old code, "
            "or give the function another name and another stream or table: that output is filled from the head of its inputs",
            output=output.name,
            changes=found,
        )


def check_claims(store: Store, graph: Graph) -> None:
    """ConflictError if another pipeline or program claims an output."""
    names = {*store.streams(), *store.tables()}
    for output in graph.outputs.values():
        if output.target in names:
            owner = store.stream(output.target).claimed_by
            if owner is not None and owner != claimant(graph.pipeline):
                raise ConflictError(
                    f"pipeline {graph.pipeline}: {output.target} is claimed by {owner}, so {output.name!r} can't fill it: give it another "
                    f"stream or table, or end that claim with headwater release-claim {output.target}",
                    owner=owner,
                )


def check_inputs(store: Store, graph: Graph) -> None:
    """InvalidRequestError for the first input that neither exists nor is an output. Needs no Spark."""
    streams, tables = set(store.streams()), set(store.tables())
    for output in graph.outputs.values():
        kept = tables if output.is_table else streams
        if output.target in (streams | tables) - kept:
            kind = store.stream(output.target).kind
            raise InvalidRequestError(
                f"pipeline {graph.pipeline}: {output.target} is of kind {kind!r}, and {output.name!r} fills a "
                f"{'table' if output.is_table else 'stream'}: give it another name"
            )
        for kind, name in graph.inputs(output):
            producer = graph.producer(name)
            if kind == "stream" and name not in streams and (producer is None or producer.is_table):
                found = "it is a table: use read.table" if name in tables else "there is no such stream"
                raise InvalidRequestError(f"pipeline {graph.pipeline}: {output.name!r} reads the stream {name}, and {found}")
            if kind == "table" and name not in tables and (producer is None or not producer.is_table):
                raise InvalidRequestError(f"pipeline {graph.pipeline}: {output.name!r} reads the table {name}, and there is no such table")


def check_targets(store: Store, graph: Graph, built: Mapping[str, Built]) -> None:
    """InvalidRequestError if the rows of an output don't fit the stream that is there."""
    streams = set(store.streams())
    for output in graph.outputs.values():
        if output.target in streams and not output.is_table:
            make_target(store, output, built[output.name].df)
