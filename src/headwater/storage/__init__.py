"""Immutable bytes under a name: files, memory or an object store behind one protocol.

What `put` or a journal's `append` returned is durable; what a key names never changes. Storage knows nothing of streams: the catalog
decides which bytes are data.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from headwater.errors import InvalidRequestError
from headwater.storage.files import make_directory
from headwater.storage.interface import Buffer, Journal, ObjectInfo, Place, Storage
from headwater.storage.local import LocalStorage
from headwater.storage.memory import open_memory

__all__ = ["Buffer", "Journal", "ObjectInfo", "Place", "Storage", "make_directory", "open_storage", "parse_file_url"]

_REMOTE_SCHEMES = ("s3", "gs", "az")


def open_storage(url: str, options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage at `url`: a path or file://, memory://name, s3://bucket/prefix, gs:// or az://.

    `options` are the object store's own settings (endpoint, access_key_id, region, allow_http ...). Nothing is made or asked for
    until the first use, so a wrong bucket or key shows then.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if scheme in _REMOTE_SCHEMES:
        return _open_remote(url, options or {})
    if options:
        raise InvalidRequestError(f"{url} takes no storage options, and got: {', '.join(sorted(options))}")
    if not rest:
        raise InvalidRequestError(f"{url!r} names no place: give a path, or something like memory://name")
    if scheme == "memory":
        return open_memory(rest)
    if scheme == "file":
        return LocalStorage(parse_file_url(url) if separator else rest)
    raise InvalidRequestError(f"{url}: no storage is called {scheme}://; there are: a path, file://, memory://, s3://, gs://, az://")


def parse_file_url(url: str) -> str:
    """The path that a file:// URL names."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InvalidRequestError(f"{url} names a host: a file URL has three slashes, like file:///data/store")
    if not parts.path:
        raise InvalidRequestError(f"{url!r} names no place: give a path, or something like file:///data/store")
    if "?" in url or "#" in url:
        raise InvalidRequestError(f"{url}: in a URL, a path's ? is written %3F and its # %23")
    return unquote(parts.path)


def _open_remote(url: str, options: Mapping[str, str]) -> Storage:
    # Imported here because it is an extra, and because loading it takes longer than the rest of the package.
    try:
        from headwater.storage.objects import ObjectStorage
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "obstore":
            raise
        raise InvalidRequestError(f"{url} needs the obstore package: pip install 'headwater[s3]'") from error
    return ObjectStorage(url, options)
