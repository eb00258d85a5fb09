"""The errors of pipelines, on top of those of the store."""

from __future__ import annotations

from headwater import ConflictError, HeadwaterError


class IncompatibleError(ConflictError):
    """A stateful query is not the one that wrote its state. Nothing was started: run the old code, or give the output a new name."""


class OutputFailedError(HeadwaterError):
    """An output ended with an error that a restart can't help. The message names it; correct the cause and run the pipeline again."""
