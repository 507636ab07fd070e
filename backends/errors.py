"""Everything a backend raises: a closed set, each error naming its object and keeping its cause.

::

    BackendError
    ├── NotFound           no such object
    ├── AlreadyExists      an object of that name stands, whole and durable; objects are never replaced
    ├── Transient          may succeed if tried again
    ├── Permanent          will not succeed if tried again
    │   ├── NoSpace        the store is full
    │   └── Truncated      the object ends before the range asked for
    └── OutcomeUnknown     the write may or may not have happened: read back before trying again

Beside it stand ValueErrors for what cannot be asked for at all: `key.InvalidKey` and `InvalidURL`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .key import ObjectKey


class BackendError(Exception):
    """Root of the set. `key` is the object it is about (None: the store), `message` says what failed and the remedy."""

    full = False  #: whether the cause is a lack of space

    def __init__(self, key: ObjectKey | None, message: str) -> None:
        super().__init__(key, message)
        self.key = key
        self.message = message

    def __str__(self) -> str:
        return f"{'the store' if self.key is None else self.key}: {self.message}"


class NotFound(BackendError):
    """There is no such object."""


class AlreadyExists(BackendError):
    """An object of that name stands; nothing was written."""


class Transient(BackendError):
    """The call failed without effect and may succeed if tried again."""


class Permanent(BackendError):
    """The call failed without effect and will fail again until someone acts on the message."""


class NoSpace(Permanent):
    """The store has no room for the object."""

    full = True


class Truncated(Permanent):
    """The object ends before the range asked for: it is not what the reader was told it is."""


class OutcomeUnknown(BackendError):
    """The write may or may not have happened; only reading back can tell."""


class InvalidURL(ValueError):
    """The URL names no place that objects can be stored in; the message gives the forms that do."""
