"""URLs: one spelling for each place, and the backend that serves it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_to_bytes

from .errors import InvalidURL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Backend

SUPPORTED = "a path, file:///path or memory://name"


def open_url(url: str, environment: Mapping[str, str] | None) -> Backend:
    """See `backends.open_backend`."""
    url = canonical(url)
    backend = _open(url, environment)
    backend.url = url
    return backend


def _open(url: str, environment: Mapping[str, str] | None) -> Backend:
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        from .local import LocalBackend

        return LocalBackend(os.fsdecode(unquote_to_bytes(rest)))
    if scheme == "memory":
        from .memory import MemoryBackend

        return MemoryBackend(rest)
    raise InvalidURL(f"{url!r}: nothing here serves {scheme}://; use {SUPPORTED}")


def canonical(url: str) -> str:
    """See `backends.canonical_url`."""
    if not url:
        raise InvalidURL(f"{url!r} names no place; use {SUPPORTED}")
    if "://" not in url and not url.startswith("file:"):
        return _file_url(os.fsencode(os.path.expanduser(url)))
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme.startswith("file:"):
        raise InvalidURL(f"{url!r} must be file:///path: a file lies on this machine, at an absolute path")
    if scheme == "file":
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise InvalidURL(f"{url!r} must be file:///path: a file lies on this machine, at an absolute path")
        return _file_url(b"/" + unquote_to_bytes(path))
    place = rest.rstrip("/")
    if not place:
        raise InvalidURL(f"{url!r} lacks the name of the place, as in {scheme}://name")
    if scheme in ("hdfs", "webhdfs"):  # what comes first is a host there: its case does not matter
        host, slash, path = place.partition("/")
        place = host.lower() + slash + path
    return f"{scheme}://{place}"


def _file_url(path: bytes) -> str:
    if b"\0" in path:
        raise InvalidURL(f"{path!r} holds a NUL; use {SUPPORTED}")
    return "file://" + quote(os.path.realpath(path))
