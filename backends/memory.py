"""Objects in this process's memory, for tests and for memory:// stores."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from .base import WHOLE_LIMIT, Backend, Capabilities, ObjectInfo, check_range, flat
from .errors import AlreadyExists, NotFound, Permanent, Truncated
from .key import ObjectKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from typing_extensions import Buffer


class Namespace:
    """The objects of one memory://name, shared by all its backends in this process, whatever their event loop."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, float]] = {}  # path -> content, time stored


_namespaces: dict[str, Namespace] = {}


class MemoryBackend(Backend):
    """All objects of one name, kept until the process ends."""

    capabilities = Capabilities(conditional_put=True, durability="process")

    def __init__(self, name: str) -> None:
        self._space = _namespaces.setdefault(name, Namespace())

    async def get(self, key: ObjectKey, *, limit: int = WHOLE_LIMIT) -> bytes:
        data, _ = self._find(key)
        if len(data) > limit:
            raise Permanent(key, f"has {len(data)} bytes, more than the {limit} that the reader accepts")
        return data

    async def get_range(self, key: ObjectKey, start: int, length: int) -> memoryview:
        check_range(start, length)
        data, _ = self._find(key)
        if start + length > len(data):
            raise Truncated(key, f"truncated: expected at least {start + length} bytes, it has {len(data)}")
        return memoryview(data)[start : start + length]

    async def put(self, key: ObjectKey, parts: AsyncIterable[Buffer]) -> int:
        data = bytearray()
        async for part in parts:
            data += flat(part)
        await self.put_if_absent(key, bytes(data))
        return len(data)

    async def put_if_absent(self, key: ObjectKey, data: bytes) -> None:
        entry = (bytes(data), time.time())
        with self._space.lock:
            if self._space.objects.setdefault(key.path, entry) is not entry:
                raise AlreadyExists(key, "stands already and is never replaced")

    async def list(self, prefix: ObjectKey | None = None) -> AsyncIterator[ObjectInfo]:
        start = "" if prefix is None else f"{prefix}/"
        with self._space.lock:
            entries = sorted((path, len(data), stored) for path, (data, stored) in self._space.objects.items())
        for path, size, stored in entries[bisect_left(entries, (start,)) :]:
            if not path.startswith(start):
                break
            yield ObjectInfo(ObjectKey(path), size, stored)

    async def stat(self, key: ObjectKey) -> ObjectInfo:
        data, stored = self._find(key)
        return ObjectInfo(key, len(data), stored)

    async def delete(self, key: ObjectKey) -> None:
        with self._space.lock:
            if self._space.objects.pop(key.path, None) is None:
                raise NotFound(key, "there is no such object")

    def _find(self, key: ObjectKey) -> tuple[bytes, float]:
        with self._space.lock:
            found = self._space.objects.get(key.path)
        if found is None:
            raise NotFound(key, "there is no such object")
        return found
