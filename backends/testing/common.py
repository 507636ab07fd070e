"""What the parts of the conformance suite share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from backends.key import ObjectKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np
    from typing_extensions import Buffer

    from backends.base import Backend

A = ObjectKey("folder/object")
DATA = bytes(range(256)) * 4


async def stream(*parts: Buffer) -> AsyncIterator[Buffer]:
    for part in parts:
        yield part


async def keys(backend: Backend, prefix: str | None = None) -> list[str]:
    return [info.key.path async for info in backend.list(None if prefix is None else ObjectKey(prefix))]


def buffer(array: np.ndarray[Any, Any]) -> Buffer:
    """The array itself, as type checkers on Python before 3.12 do not know that it is a buffer."""
    return cast("Buffer", array)
