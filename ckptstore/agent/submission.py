"""What one rank hands its agent: a plan once for each structure, then a snapshot for each save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backends.sharedmem import Segment

from ..format.keys import Attempt
from ..format.model import VALUE, Box, SliceKey, whole


def key_to_json(key: SliceKey) -> list[Any]:
    return [key.name, key.rank, key.dtype, key.shape, key.box.offset, key.box.shape]


def key_from_json(found: list[Any]) -> SliceKey:
    name, rank, dtype, shape, offset, extent = found
    return SliceKey(name, rank, dtype, tuple(shape), Box(tuple(offset), tuple(extent)))


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, start + length)`` of a slice, `skip` bytes into their chunk."""

    key: SliceKey
    start: int
    length: int
    skip: int


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    offset: int  #: in the segment
    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class PlannedWitness:
    """A slice held by several ranks whose bytes lie in this rank's segment to be compared with the others'."""

    key: SliceKey
    offset: int
    across: bool  #: some of its holders are on other nodes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Which bytes of its segment a rank owns. The same for every save until the structure changes."""

    fingerprint: str  #: of the plan of all ranks together
    rank: int
    world_size: int
    node: int
    nodes: int
    local_ranks: tuple[int, ...]
    chunks: tuple[PlannedChunk, ...]
    witnesses: tuple[PlannedWitness, ...]
    empty: tuple[SliceKey, ...]  #: owned slices without elements
    layouts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        keys: dict[SliceKey, int] = {}

        def index(key: SliceKey) -> int:
            return keys.setdefault(key, len(keys))

        chunks = [
            [c.offset, c.size, [[index(p.key), p.start, p.length, p.skip] for p in c.pieces]] for c in self.chunks
        ]
        witnesses = [[index(w.key), w.offset, w.across] for w in self.witnesses]
        empty = [index(key) for key in self.empty]
        return {
            "fingerprint": self.fingerprint,
            "rank": self.rank,
            "world_size": self.world_size,
            "node": self.node,
            "nodes": self.nodes,
            "local_ranks": self.local_ranks,
            "keys": [key_to_json(key) for key in keys],
            "chunks": chunks,
            "witnesses": witnesses,
            "empty": empty,
            "layouts": self.layouts,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> RankPlan:
        keys = [key_from_json(key) for key in found["keys"]]
        return cls(
            fingerprint=found["fingerprint"],
            rank=found["rank"],
            world_size=found["world_size"],
            node=found["node"],
            nodes=found["nodes"],
            local_ranks=tuple(found["local_ranks"]),
            chunks=tuple(
                PlannedChunk(offset, size, tuple(Piece(keys[i], *where) for i, *where in pieces))
                for offset, size, pieces in found["chunks"]
            ),
            witnesses=tuple(PlannedWitness(keys[i], offset, across) for i, offset, across in found["witnesses"]),
            empty=tuple(keys[i] for i in found["empty"]),
            layouts=found["layouts"],
        )


@dataclass(frozen=True, slots=True)
class SubmittedValue:
    """A plain value's encoding, in the segment behind the planned bytes."""

    name: str
    rank: int
    offset: int
    length: int
    owned: bool
    witness: bool  #: several ranks hold it, and must hold the same
    across: bool

    @property
    def key(self) -> SliceKey:
        return SliceKey(self.name, self.rank, VALUE, (self.length,), whole((self.length,)))


@dataclass(slots=True)
class Submission:
    """One rank's snapshot of one attempt, in the agent."""

    plan: RankPlan
    attempt: Attempt
    segment: Segment
    values: list[SubmittedValue]
    digests: list[tuple[SliceKey, bytes, bool]]  #: of larger replicas, in the saves that compare those too
    metrics: dict[str, Any] | None
    pin: bool
    run_id: str = ""
    again: bool = False  #: submitted before, to an agent that died since

    def read(self, offset: int, size: int) -> memoryview:
        """:raises ValueError: not inside the segment."""
        if offset < 0 or size < 0 or offset + size > self.segment.size:
            raise ValueError(f"bytes [{offset}, {offset + size}) of a segment of {self.segment.size}")
        return self.segment.buffer[offset : offset + size]
