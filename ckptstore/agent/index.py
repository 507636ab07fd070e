"""Chunks that a save may reference instead of writing them again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from ..format.part import Chunk, Part


class ChunkIndex:
    """Committed chunks, by digest. Only those of one checkpoint, young enough, in packs that are over half live.

    One bad pack must not spoil every step to come, whence the age; collection works by whole packs, whence the half:
    at most twice the live bytes are stored.
    """

    def __init__(self, max_age: float) -> None:
        self.max_age = max_age
        self.chunks: dict[tuple[bytes, int], Chunk] = {}
        self.packs: dict[str, dict[str, Any]] = {}  #: size and birth (seconds since the epoch) of each pack

    def replace(self, parts: Iterable[Part]) -> None:
        """Offer the chunks of these parts, and no others."""
        packs: dict[str, dict[str, Any]] = {}
        chunks: dict[tuple[bytes, int], Chunk] = {}
        for part in parts:
            packs |= part.header["packs"]
            chunks |= {(e.chunk.digest, e.chunk.size): e.chunk for e in part.extents if e.chunk.pack}
        live: dict[str, int] = {}
        for chunk in chunks.values():
            live[chunk.pack] = live.get(chunk.pack, 0) + chunk.stored
        self.packs = {name: pack for name, pack in packs.items() if 2 * live.get(name, 0) > pack["size"]}
        self.chunks = {key: chunk for key, chunk in chunks.items() if chunk.pack in self.packs}

    def find(self, digest: bytes, size: int) -> Chunk | None:
        chunk = self.chunks.get((digest, size))
        if chunk is None or time.time() - self.packs[chunk.pack]["born"] > self.max_age:
            return None
        return chunk

    def describe(self, names: Iterable[str], written: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Size and birth of the packs of a part: those just written, and those referenced."""
        return {name: written.get(name) or self.packs[name] for name in names}
