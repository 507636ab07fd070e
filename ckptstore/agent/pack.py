"""Hash chunks, drop those already stored, and stream the rest into packs: each step pulls from the one before."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from backends.base import Backend

from ..format.keys import Attempt
from ..format.part import Chunk
from .index import ChunkIndex

PACK_SIZE = 512 << 20  #: a pack is closed once it has this many bytes
_AHEAD = 8  # chunks hashed ahead of the upload


@dataclass
class Packer:
    """Writes one node's chunks of one attempt. `packs`: those written, with size and birth."""

    backend: Backend
    attempt: Attempt
    node: int
    incarnation: str
    index: ChunkIndex
    pool: Executor
    packs: dict[str, dict[str, Any]] = field(default_factory=dict)
    bytes_written: int = 0

    async def store(self, chunks: Iterable[memoryview]) -> list[Chunk]:
        """Where each chunk lies, in the order given; all of them durable on return."""
        places: list[Chunk] = []
        fresh = self._fresh(chunks, places)
        first = await anext(fresh, None)
        while first is not None:
            key = self.attempt.pack(self.node, self.incarnation, len(self.packs))
            self._name, self._offset, self._next = str(key), 0, None
            self.packs[self._name] = {"size": 0, "born": time.time()}
            await self.backend.put(key, self._stream(first, fresh, places))
            self.packs[self._name]["size"] = self._offset
            self.bytes_written += self._offset
            first = self._next
        return places

    _name = ""
    _offset = 0
    _next: tuple[int, bytes, memoryview] | None = None

    async def _fresh(
        self, chunks: Iterable[memoryview], places: list[Chunk]
    ) -> AsyncIterator[tuple[int, bytes, memoryview]]:
        """The chunks that nothing stored has yet; of the others, `places` gets the place."""
        written: dict[tuple[bytes, int], int] = {}
        repeats: list[tuple[int, int]] = []
        async for digest, data in self._hashed(chunks):
            known = self.index.find(digest, len(data))
            at = len(places)
            places.append(known or Chunk(digest, "", 0, 0, len(data)))
            if known:
                continue
            if (earlier := written.setdefault((digest, len(data)), at)) != at:
                repeats.append((at, earlier))
                continue
            yield at, digest, data
        for at, earlier in repeats:
            places[at] = places[earlier]

    async def _hashed(self, chunks: Iterable[memoryview]) -> AsyncIterator[tuple[bytes, memoryview]]:
        loop = asyncio.get_running_loop()
        ahead: deque[tuple[asyncio.Future[bytes], memoryview]] = deque()
        for data in chunks:
            ahead.append((loop.run_in_executor(self.pool, digest, data), data))
            if len(ahead) == _AHEAD:
                future, head = ahead.popleft()
                yield await future, head
        for future, head in ahead:
            yield await future, head

    async def _stream(
        self,
        first: tuple[int, bytes, memoryview],
        fresh: AsyncIterator[tuple[int, bytes, memoryview]],
        places: list[Chunk],
    ) -> AsyncIterator[memoryview]:
        item: tuple[int, bytes, memoryview] | None = first
        while item is not None and self._offset < PACK_SIZE:
            at, found, data = item
            places[at] = Chunk(found, self._name, self._offset, len(data), len(data))
            self._offset += len(data)
            yield data
            item = await anext(fresh, None)
        self._next = item


def digest(data: memoryview) -> bytes:
    """BLAKE3, the digest of chunks and witnesses."""
    return blake3(data).digest()
