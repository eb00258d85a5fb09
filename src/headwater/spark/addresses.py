"""Where a store is, as options say it: picklable, and opened once in each process that needs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from headwater import InvalidRequestError, Store, UnavailableError
from headwater import open as open_store

T = TypeVar("T")

#: Open stores of this process: Spark calls many short-lived objects in one long-lived worker.
_opened: dict[tuple[int, StoreAddress], Store] = {}
_RETRY_SECONDS = 120.0


class StoreAddress(NamedTuple):
    """What `hw.open` takes."""

    url: str
    catalog: str | None = None
    storage_options: tuple[tuple[str, str], ...] = ()

    def open(self, *, create: bool = False) -> Store:
        """The store, opened by the first call in this process."""
        key = (os.getpid(), self)
        found = _opened.get(key)
        if found is None:
            options = dict(self.storage_options) or None
            found = _opened[key] = open_store(self.url, catalog=self.catalog, create=create, upkeep=False, storage_options=options)
        return found


def read_address(options: Mapping[str, str]) -> StoreAddress:
    """The address in the options `store` (or the path given to load and save), `catalog` and `storage.*`, or in the environment.

    A catalog that is given and empty is none, whatever the environment says: so an open store is named.
    """
    url = options.get("store") or options.get("path") or os.environ.get("HEADWATER_STORE")
    if not url:
        raise InvalidRequestError("which store? Give option('store', 'some/dir'), or set HEADWATER_STORE")
    storage = {name.removeprefix("storage."): value for name, value in options.items() if name.startswith("storage.")}
    catalog = options["catalog"] if "catalog" in options else os.environ.get("HEADWATER_CATALOG")
    return StoreAddress(url, catalog or None, tuple(sorted(storage.items())))


def address_of(store: Store | str | os.PathLike[str]) -> StoreAddress:
    """The address of an open store, or of what a path or URL names."""
    if isinstance(store, Store):
        url, catalog, storage_options = store.address
        return StoreAddress(url, catalog, tuple(sorted((storage_options or {}).items())))
    return StoreAddress(os.fspath(store), os.environ.get("HEADWATER_CATALOG"))


def patiently(call: Callable[[], T]) -> T:
    """Call again while the store is out of reach: one error in a driver's call ends the query."""
    deadline = time.monotonic() + _RETRY_SECONDS
    wait = 0.05
    while True:
        try:
            return call()
        except UnavailableError:
            if time.monotonic() + wait > deadline:
                raise
        time.sleep(wait)
        wait = min(2 * wait, 5.0)
