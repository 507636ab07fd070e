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

Fresh = tuple[int, bytes, memoryview]  # a chunk to be stored: its place in the order given, its digest, its bytes


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
        fresh = _Peekable(self._fresh(chunks, places))
        while await fresh.more():
            key = self.attempt.pack(self.node, self.incarnation, len(self.packs))
            pack = self.packs[str(key)] = {"size": 0, "born": time.time()}
            pack["size"] = await self.backend.put(key, self._stream(str(key), fresh, places))
            self.bytes_written += pack["size"]
        return places

    async def _fresh(self, chunks: Iterable[memoryview], places: list[Chunk]) -> AsyncIterator[Fresh]:
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

    async def _stream(self, pack: str, fresh: _Peekable, places: list[Chunk]) -> AsyncIterator[memoryview]:
        size = 0
        while size < PACK_SIZE and await fresh.more():
            at, found, data = await fresh.take()
            places[at] = Chunk(found, pack, size, len(data), len(data))
            size += len(data)
            yield data


class _Peekable:
    """Chunks to be stored, which can be asked whether there are more: no pack is begun for nothing."""

    def __init__(self, source: AsyncIterator[Fresh]) -> None:
        self._source = source
        self._next: Fresh | None = None

    async def more(self) -> bool:
        if self._next is None:
            self._next = await anext(self._source, None)
        return self._next is not None

    async def take(self) -> Fresh:
        item, self._next = self._next, None
        assert item is not None  # ask `more` first
        return item


def digest(data: memoryview) -> bytes:
    """BLAKE3, the digest of chunks and witnesses."""
    return blake3(data).digest()
