"""Who writes what: pure functions of what each rank holds, so that every holder comes to the same answer alone.

The chunk grid depends on names, boxes and the chunk size only: a change in the number of replicas moves chunks between
ranks and changes none of them. A *class* is the set of ranks that hold a slice; its chunks are shared among its ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from ..agent.submission import Piece, PlannedChunk, PlannedWitness
from ..format.model import SliceKey, itemsize

_WITNESS_LIMIT = 1 << 20  # replicas of fewer bytes may be compared at every save
_WITNESS_FLOOR = 4 << 20  # so many bytes of a class always may
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that are hashed, stored and read as one: a run of a large slice, or several small slices."""

    pieces: tuple[Piece, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """This rank's segment."""

    chunks: tuple[PlannedChunk, ...]
    witnesses: tuple[PlannedWitness, ...]
    size: int


def chunk_grid(
    slices: Iterable[SliceKey], aliases: Mapping[SliceKey, Sequence[SliceKey]], chunk_size: int
) -> list[Chunk]:
    """The chunks of the slices of one class. `aliases`: further names of the same bytes, which cost nothing more."""
    small_limit, group_size = chunk_size >> 12, chunk_size >> 8
    chunks: list[Chunk] = []
    small: list[SliceKey] = []
    for key in sorted(slices, key=_order):
        if 0 < key.nbytes < small_limit:
            small.append(key)
            continue
        for start in range(0, key.nbytes, chunk_size):
            length = min(chunk_size, key.nbytes - start)
            names = (key, *aliases.get(key, ()))
            chunks.append(Chunk(tuple(Piece(name, start, length, 0) for name in names), length))
    groups = -(-sum(key.nbytes for key in small) // group_size)
    count = 1 << max(0, groups - 1).bit_length()  # a power of two: a few tensors more seldom move the others
    buckets: list[list[SliceKey]] = [[] for _ in range(count)]
    for key in small:
        buckets[_hash(key) % count].append(key)
    for bucket in buckets:
        pieces, size = [], 0
        for key in sorted(bucket, key=lambda key: (-itemsize(key.dtype), _order(key))):  # so that all are aligned
            pieces += [Piece(name, 0, key.nbytes, size) for name in (key, *aliases.get(key, ()))]
            size += key.nbytes
        if pieces:
            chunks.append(Chunk(tuple(pieces), size))
    return chunks


def share(chunks: Sequence[Chunk], ranks: Sequence[int]) -> list[int]:
    """The rank that writes each chunk: the largest first, each to the rank with least so far."""
    loads = [(0, position) for position in range(len(ranks))]
    owners = [0] * len(chunks)
    for index in sorted(range(len(chunks)), key=lambda i: -chunks[i].size):
        load, position = heapq.heappop(loads)
        owners[index] = ranks[position]
        heapq.heappush(loads, (load + chunks[index].size, position))
    return owners


def witnesses(slices: Iterable[SliceKey], ranks: Sequence[int]) -> list[SliceKey]:
    """The slices of a class that its ranks compare at every save: what is small, smallest first.

    Comparing costs a copy on every rank, owner or not, so it is bounded by a tenth of what each rank owns.
    """
    keys = [key for key in slices if key.nbytes]
    budget = max(_WITNESS_FLOOR, sum(key.nbytes for key in keys) // len(ranks) // 10)
    found = []
    for key in sorted(keys, key=lambda key: (key.nbytes, _order(key))):
        budget -= key.nbytes
        if key.nbytes >= _WITNESS_LIMIT or budget < 0:
            break
        found.append(key)
    return found


def lay_out(owned: Sequence[Chunk], witnesses: Sequence[tuple[SliceKey, bool]]) -> Layout:
    """Where this rank's chunks lie in its segment, and behind them the witnesses that are not among them."""
    at, chunks = 0, []
    inside: dict[SliceKey, int] = {}
    for chunk in owned:
        at = -(-at // _ALIGN) * _ALIGN
        chunks.append(PlannedChunk(at, chunk.size, chunk.pieces))
        for piece in chunk.pieces:
            if piece.length == piece.key.nbytes:
                inside[piece.key] = at + piece.skip
        at += chunk.size
    planned = []
    for key, across in witnesses:
        if key not in inside:
            at = -(-at // _ALIGN) * _ALIGN
            inside[key] = at
            at += key.nbytes
        planned.append(PlannedWitness(key, inside[key], across))
    return Layout(tuple(chunks), tuple(planned), at)


def _order(key: SliceKey) -> tuple[object, ...]:
    return key.name, key.rank, key.box.offset


def _hash(key: SliceKey) -> int:
    return int.from_bytes(blake3(repr((key.name, key.box.offset, key.box.shape)).encode()).digest(8), "little")
