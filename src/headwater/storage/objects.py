"""Storage in an object store (S3, Google, Azure), through obstore.

A put is one request that only creates: the store itself refuses to overwrite. What may be repeated is repeated here for
`limits.RETRY_SECONDS`; the rest is raised at once, in words that say what to do.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import obstore
import pyarrow as pa
from obstore import exceptions
from obstore.store import from_url

from headwater.errors import AlreadyExistsError, CorruptDataError, HeadwaterError, InvalidRequestError, UnavailableError
from headwater.model import limits
from headwater.runtime import failpoints
from headwater.runtime.clock import from_datetime
from headwater.runtime.retry import retry
from headwater.storage.interface import Buffer, Buffers, Journal, ObjectInfo, Push, byte_views, is_equal, missing_error, short_error
from headwater.storage.ranges import Range, merge, read_merged

T = TypeVar("T")

#: A second request costs more than this many bytes read for nothing.
_GAP_BYTES = limits.MIB
_LIST_OBJECTS = 1000

#: Settings of the HTTP client. obstore takes them apart from the store's own, and panics if they are mixed.
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_SAID = re.compile(r"<(?:Code|Message)>([^<]*)</")
_EXPIRED = re.compile(r"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired)</")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)

#: The process that started obstore's threads.
_threads_pid: int | None = None


class ObjectStorage:
    """Objects below a bucket's prefix."""

    local = False

    def __init__(
        self,
        url: str,
        options: Mapping[str, str],
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._sleep = sleep
        self._monotonic = monotonic
        named = {_client_option(name) or name: value for name, value in options.items()}
        config: Any = {name: value for name, value in named.items() if name not in _CLIENT_OPTIONS}
        client = {name: value for name, value in named.items() if name in _CLIENT_OPTIONS}

        def connect(timeout: float, **others: str) -> Any:
            given: Any = {"timeout": f"{timeout:g}s", **others, **client}
            # obstore's own retries are off: it never repeats a create-only put whose answer was lost, because it cannot know
            # that the object it then finds is its own. We can, so all repeating is ours, with one deadline.
            return from_url(url, config=config, client_options=given, retry_config={"max_retries": 0})

        # Of a large read each piece that arrives shows that it goes on. A put is one silence, up to its answer.
        silence = {} if "timeout" in client else {"read_timeout": f"{limits.REQUEST_SECONDS:g}s"}
        try:
            # A client has one time-out for whole requests, however large: so there are some of them, 4 ms and 100 KiB each. All are made
            # now: each takes what it is not given from the environment, which may be another one later.
            self._store = connect(limits.REQUEST_SECONDS)
            self._large_reads = connect(limits.TRANSFER_SECONDS, **silence)
            self._large_puts = [(size, connect(seconds)) for size, seconds in limits.PUT_SECONDS.items()]
        except BaseException as error:
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise InvalidRequestError(f"cannot open {url}: {_first_line(error)}") from error

    def put(self, key: str, buffers: Sequence[Buffer]) -> None:
        views = byte_views(buffers)
        store = self._store_to_put(sum(view.nbytes for view in views))

        def put_once() -> None:
            failpoints.reach("object.put")
            try:
                obstore.put(store, key, views, mode="create", use_multipart=False)
            except exceptions.AlreadyExistsError as error:
                self._check_equal(key, views, error)

        self._request(f"write {key}", put_once)

    def write(self, key: str, produce: Callable[[pa.NativeFile], None], push: Push | None = None) -> None:
        file = pa.BufferOutputStream()
        produce(file)
        self.put(key, [file.getvalue()])

    def get(self, key: str, start: int, length: int) -> Buffer:
        return self.get_ranges(key, [(start, length)])[0]

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> Buffers:
        merged = merge(ranges, gap_bytes=_GAP_BYTES)
        return read_merged(ranges, merged, lambda wanted: self._request(f"read {key}", lambda: self._fetch(key, wanted)))

    def expect(self, key: str, ranges: Sequence[Range]) -> bool:
        return False

    def size(self, key: str) -> int | None:
        return self._request(f"look for {key}", lambda: self._find_size(key))

    def delete(self, keys: Sequence[str], rest: Callable[[], None] = lambda: None) -> None:
        def delete_all() -> None:
            try:
                obstore.delete(self._store, list(keys))
            except FileNotFoundError as error:
                _refuse_missing_bucket(error)
                # Google and Azure complain about the first missing one, with the rest undone.
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(self._store, key)

        if keys:
            self._request(f"delete {len(keys)} objects", delete_all)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        assert not prefix or prefix.endswith("/"), prefix
        after: str | None = None
        pages: Iterator[Sequence[Any]] | None = None

        def next_page() -> Sequence[Any]:
            nonlocal pages
            try:
                if pages is None:
                    pages = iter(obstore.list(self._store, prefix or None, offset=after, chunk_size=_LIST_OBJECTS))
                return next(pages, ())
            except BaseException:
                pages = None  # A broken listing is taken up again behind the last key it gave.
                raise

        while page := self._request(f"list {prefix}", next_page):
            for found in page:
                after = str(found["path"])
                yield ObjectInfo(after, found["size"], from_datetime(found["last_modified"]))

    def journal(self, key_for: Callable[[int], str]) -> Journal:
        raise InvalidRequestError(f"{self.url} has no journals: an object store cannot append. Put whole objects")

    def close(self) -> None:
        """obstore closes idle connections by itself."""

    def _fetch(self, key: str, wanted: Sequence[Range]) -> Buffers:
        starts, lengths = [start for start, _ in wanted], [length for _, length in wanted]
        store = self._store if sum(lengths) <= limits.TRANSFER_BYTES else self._large_reads
        try:
            # Without merging of its own: obstore panics when it cuts merged ranges out of an object that is too short.
            fetched = obstore.get_ranges(store, key, starts=starts, lengths=lengths, coalesce=0)
        except FileNotFoundError as error:
            _refuse_missing_bucket(error)
            raise missing_error(key, starts[0], sum(lengths)) from error
        except exceptions.BaseError as error:
            if _find_status(error) != 416:
                raise
            size = self._find_size(key) or 0
            start, length = next((each for each in wanted if each[0] >= size), wanted[-1])
            raise short_error(key, start, length, 0) from error
        for (start, length), data in zip(wanted, fetched, strict=True):
            if len(data) != length:
                raise short_error(key, start, length, len(data))
        return [memoryview(data) for data in fetched]

    def _store_to_put(self, size: int) -> Any:
        if size <= limits.TRANSFER_BYTES:
            return self._store
        return next((store for most, store in self._large_puts if size <= most), self._large_puts[-1][1])

    def _find_size(self, key: str) -> int | None:
        try:
            return int(obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def _check_equal(self, key: str, views: Sequence[memoryview], error: Exception) -> None:
        """The key exists: fine if an earlier try of this put arrived, and only its answer was lost."""
        given, stored = sum(view.nbytes for view in views), self._find_size(key)
        if stored is None:
            raise _BusyError(f"another put of {key} is under way") from error
        try:
            found = self._fetch(key, [(0, given)])[0] if given and given == stored else b""
        except CorruptDataError as gone:
            # Taken for garbage and deleted since we looked for it.
            raise _BusyError(f"{key} was just deleted") from gone
        if given != stored or not is_equal(views, found):
            raise AlreadyExistsError(f"{key} exists with other bytes: {stored} are stored, {given} were given", key=key) from error

    def _request(self, action: str, call: Callable[[], T]) -> T:
        """Make a call to the object store, repeated while that can help; what remains is one of our errors."""
        _refuse_fork()
        try:
            return retry(
                call,
                retryable=is_transient,
                deadline_seconds=limits.RETRY_SECONDS,
                # A connection that hangs says nothing about the next one, and outlives the deadline.
                least_repeats=1,
                sleep=self._sleep,
                monotonic=self._monotonic,
            )
        except HeadwaterError:
            raise
        except Exception as error:
            raise self._explain(action, error) from error
        except BaseException as error:
            if not _is_panic(error):
                raise
            # As of credentials with a line break in them. They may be good again soon, and a writer must keep its events until then.
            advice = "Check the storage options and credentials, then repeat"
            raise UnavailableError(f"cannot {action} in {self.url}: obstore failed. {advice}: {_first_line(error)}") from error

    def _explain(self, action: str, error: Exception) -> HeadwaterError:
        reason = _first_line(error)
        if _NO_BUCKET.search(str(error)):
            return InvalidRequestError(f"cannot {action}: the bucket of {self.url} does not exist. Create it, or correct the name")
        if said := ": ".join(_SAID.findall(str(error).partition("Debug source")[0])):
            reason += f" ({said})"
        if "object with invalid path" in reason:
            return InvalidRequestError(f"cannot {action}: below {self.url} is a key that headwater never makes. Delete it: {reason}")
        if "redirect without LOCATION" in reason or "AuthorizationHeaderMalformed" in said:
            return InvalidRequestError(f"cannot {action}: {self.url} is in another region. Give the storage option `region`: {reason}")
        if "builder error" in reason:
            advice = "An endpoint that begins with http:// needs the storage option allow_http=true"
            return InvalidRequestError(f"cannot {action}: the address of {self.url} can't be used. {advice}: {reason}")
        if isinstance(error, NotImplementedError) or _find_status(error) == 501:
            advice = "It has to create objects conditionally (If-None-Match: *)"
            return InvalidRequestError(f"cannot {action}: {self.url} can't do that. {advice}: {reason}")
        denied = isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError)
        if denied or _find_status(error) in (401, 403) or _EXPIRED.search(str(error)):
            # Not an InvalidRequestError: credentials expire, and a writer must keep its events until they are renewed.
            advice = "Check its credentials and what they allow, then repeat"
            return UnavailableError(f"cannot {action}: {self.url} refused it. {advice}: {reason}")
        return UnavailableError(f"cannot {action} in {self.url}: {reason}. Repeat the call")


class _BusyError(Exception):
    """The store refused a put because of another one that has not ended yet."""


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later: time-outs, lost or refused connections, 429 and 5xx but 501."""
    if isinstance(error, _BusyError):
        return True
    if not isinstance(error, exceptions.GenericError):
        return False
    # obstore has no type for these, only its text: a status if there was an answer, "HTTP error" if there was none.
    status = _find_status(error)
    if status is None:
        return "HTTP error" in _first_line(error) and "builder error" not in _first_line(error)
    return status in (408, 429) or (status >= 500 and status != 501) or (status == 400 and "RequestTimeout" in str(error))


def _client_option(name: Any) -> str | None:
    """The HTTP client's setting that a name stands for, in any case and with the prefix of environment variables; None if for none."""
    found = re.sub(r"^(aws|google|azure)_", "", str(name).lower())
    return found if found in _CLIENT_OPTIONS else None


def _is_panic(error: BaseException) -> bool:
    """Whether it is a fault in obstore's Rust code, for which Python has no type, and which is no Exception."""
    return type(error).__name__ == "PanicException"


def _find_status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _first_line(error: BaseException) -> str:
    """obstore's text without the answer's XML and the debugging details that follow."""
    return str(error).partition("\n")[0].partition("<")[0].strip(" :")


def _refuse_missing_bucket(error: FileNotFoundError) -> None:
    """A missing bucket is not a missing object: raise it again."""
    if _NO_BUCKET.search(str(error)):
        raise error


def _refuse_fork() -> None:
    global _threads_pid
    pid = os.getpid()
    if _threads_pid is None:
        _threads_pid = pid
    if _threads_pid != pid:
        # Seen with obstore 0.12: any call in such a child, also on a new store, waits for ever.
        raise InvalidRequestError(
            "object storage cannot be used in a process that was forked from one that had used it, because its threads did not come "
            "along: start the process with 'spawn' or 'forkserver'"
        )
