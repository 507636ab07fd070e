"""Every place that bytes can live in, behind one asynchronous promise: `Backend`.

Names are loaded when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Backend, Capabilities, ObjectInfo
    from .errors import (
        AlreadyExists,
        BackendError,
        InvalidURL,
        NoSpace,
        NotFound,
        OutcomeUnknown,
        Permanent,
        Transient,
        Truncated,
    )
    from .key import InvalidKey, ObjectKey

__all__ = [
    "AlreadyExists",
    "Backend",
    "BackendError",
    "Capabilities",
    "InvalidKey",
    "InvalidURL",
    "NoSpace",
    "NotFound",
    "ObjectInfo",
    "ObjectKey",
    "OutcomeUnknown",
    "Permanent",
    "Transient",
    "Truncated",
    "canonical_url",
    "open_backend",
]

_HOMES = {"base": ("Backend", "Capabilities", "ObjectInfo"), "key": ("InvalidKey", "ObjectKey")}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def open_backend(url: str, environment: Mapping[str, str] | None = None) -> Backend:
    """The backend for a URL: a path or file:///path, or memory://name. Opening touches no storage.

    `environment` holds the variables that credentials come from; None stands for the process's own.

    :raises InvalidURL: nothing here serves such a URL.
    """
    from .url import open_url

    return open_url(url, environment)


def canonical_url(url: str) -> str:
    """One spelling for all URLs of the same place: real absolute paths as file:///..., no trailing slash.

    :raises InvalidURL: the URL cannot be read.
    """
    from .url import canonical

    return canonical(url)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
