"""Operations under test: something else in the place of one, and sessions that end before their lease is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headwater as hw
from headwater.catalog import sessions
from headwater.catalog.database import Database, Tx
from headwater.catalog.operations import Operation

#: Given the operation's name and a function that runs it.
Call = Callable[[str, Callable[[], Any]], Any]


class _Around:
    def __init__(self, inner: Any, call: Call) -> None:
        self._inner = inner
        self._call = call

    def run(self, operation: Operation[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._call(operation.name, lambda: self._inner.run(operation, *args, **kwargs))


def intercept(monkeypatch: pytest.MonkeyPatch, store: hw.Store, call: Call) -> None:
    """Run each operation of this open store through `call`, until the patch is undone."""
    monkeypatch.setattr(store._engine, "runner", _Around(store._engine.runner, call))


def fence_all(database: Database) -> list[int]:
    """Let every live session's lease run out, and fence them all; returns their ids."""

    def work(tx: Tx) -> list[int]:
        tx.run("UPDATE session SET renewed_at = 0 WHERE live = 1")
        return sessions.fence_expired_sessions(tx)

    return database.write(work)
