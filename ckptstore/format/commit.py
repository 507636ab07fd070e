"""A commit: what makes a checkpoint exist. Its bytes follow from the parts alone, so racing writers write the same.

The same slot may hold `aborted` instead: the attempt failed, for the reason it gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from backends.key import ObjectKey

from ..errors import CorruptCheckpoint
from . import document
from .keys import Attempt, Slot
from .model import SliceKey
from .part import LIMIT as PART_LIMIT
from .part import Part


@dataclass(frozen=True, slots=True)
class PartRef:
    key: ObjectKey
    digest: str  #: BLAKE3 of the part's bytes, hexadecimal
    size: int
    node: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """:ivar layouts: device meshes, and each DTensor's mesh and placements, as it was saved."""

    attempt: Attempt
    world_size: int
    parts: tuple[PartRef, ...]
    layouts: dict[str, Any] = field(default_factory=dict)
    bytes_state: int = 0  #: unique bytes of the state
    bytes_written: int = 0  #: bytes this save added to packs
    metrics: dict[str, Any] | None = None
    pin: bool = False

    @property
    def slot(self) -> Slot:
        return self.attempt.slot


@dataclass(frozen=True, slots=True)
class Aborted:
    attempt: Attempt
    error: str  #: name of the error class that handles raise
    reason: str


def assemble(attempt: Attempt, parts: list[tuple[bytes, Part]]) -> Commit | Aborted:
    """What the slot of `attempt` must hold, given all its parts in order of nodes. Pure, and the same for everyone."""
    disagreement = _disagreement(attempt, [part for _, part in parts])
    if disagreement:
        return Aborted(attempt, *disagreement)
    refs = tuple(
        PartRef(attempt.part(node), blake3(data).hexdigest(), len(data), node, tuple(part.header["ranks"]))
        for node, (data, part) in enumerate(parts)
    )
    first = parts[0][1].header
    return Commit(
        attempt,
        world_size=first["world_size"],
        parts=refs,
        layouts=_merge([part.header["layouts"] for _, part in parts]),
        bytes_state=sum(part.header["bytes_state"] for _, part in parts),
        bytes_written=sum(part.header["bytes_written"] for _, part in parts),
        metrics=first["metrics"],
        pin=first["pin"],
    )


def _disagreement(attempt: Attempt, parts: list[Part]) -> tuple[str, str] | None:
    first = parts[0].header
    for part in parts:
        header = part.header
        for what in ("step", "plan", "generation", "run_id"):
            if header[what] != first[what]:
                who = f"ranks {first['ranks']} and {header['ranks']}"
                return "SaveFailed", f"{who} differ in {what}: {first[what]} and {header[what]}"
    written: dict[SliceKey, dict[int, int]] = {}
    for part in parts:
        for extent in part.extents:
            written.setdefault(extent.key, {})[extent.start] = extent.length
    for key, lengths in written.items():
        if sum(lengths.values()) != key.nbytes:
            return "SaveFailed", f"{key.name!r}: {sum(lengths.values())} of its {key.nbytes} bytes were written"
    seen: dict[tuple[object, ...], tuple[bytes, list[int]]] = {}
    for part in parts:
        for witness in part.witnesses:
            digest, holders = seen.setdefault(witness.key.identity, (witness.digest, part.header["ranks"]))
            if digest != witness.digest:
                return "ReplicaMismatch", replica_mismatch(witness.key.name, holders, part.header["ranks"])
    return None


def replica_mismatch(name: str, ranks: list[int], others: list[int]) -> str:
    """The message for ranks that hold different content under one name."""
    return (
        f"{name!r} has different content on ranks {ranks} and {others}, so these are no replicas. If each rank should "
        f"keep its own, mark it PerRank (or per_rank=[pattern]); if rank 0's counts, Rank0 (or rank0=[pattern])"
    )


def _merge(layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """One table of meshes and tensors of all nodes' tables."""
    meshes: list[Any] = []
    tensors: dict[str, Any] = {}
    for layout in layouts:
        for name, (mesh, placements) in layout.get("tensors", {}).items():
            description = layout["meshes"][mesh]
            if description not in meshes:
                meshes.append(description)
            tensors.setdefault(name, [meshes.index(description), placements])
    return {"meshes": meshes, "tensors": tensors} if tensors else {}


def encode(content: Commit | Aborted) -> bytes:
    attempt = content.attempt
    body: dict[str, Any] = {
        "run": attempt.run,
        "ordinal": attempt.ordinal,
        "step": attempt.step,
        "generation": attempt.generation,
    }
    if isinstance(content, Aborted):
        return document.encode("aborted", {**body, "error": content.error, "reason": content.reason})
    parts = [
        {"key": str(ref.key), "digest": ref.digest, "size": ref.size, "node": ref.node, "ranks": list(ref.ranks)}
        for ref in content.parts
    ]
    body |= {
        "world_size": content.world_size,
        "parts": parts,
        "layouts": content.layouts,
        "bytes_state": content.bytes_state,
        "bytes_written": content.bytes_written,
        "metrics": content.metrics,
        "pin": content.pin,
    }
    return document.encode("commit", body)


def decode(data: bytes, slot: Slot) -> Commit | Aborted:
    """What the slot holds.

    :raises CorruptCheckpoint: it is neither a commit nor `aborted`, or belongs to another slot.
    """
    body = document.decode(data, slot, "commit", "aborted")
    try:
        attempt = Attempt(*(_natural(body[field]) for field in ("run", "ordinal", "step", "generation")))
        if attempt.slot != slot:
            raise CorruptCheckpoint(f"{slot}: holds the commit of {attempt.slot}")
        if body["kind"] == "aborted":
            return Aborted(attempt, str(body["error"]), str(body["reason"]))
        if not isinstance(body["layouts"], dict) or not isinstance(body["metrics"], dict | None):
            raise ValueError("layouts or metrics are not a mapping")
        return Commit(
            attempt,
            world_size=_natural(body["world_size"], least=1),
            parts=tuple(_part_ref(ref) for ref in body["parts"]),
            layouts=body["layouts"],
            bytes_state=_natural(body["bytes_state"]),
            bytes_written=_natural(body["bytes_written"]),
            metrics=body["metrics"],
            pin=bool(body["pin"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{slot}: a commit with a wrong field: {error!r}") from error


def _part_ref(ref: dict[str, Any]) -> PartRef:
    key, size = ref["key"], _natural(ref["size"])
    if not isinstance(key, str) or not key.startswith("parts/") or size > PART_LIMIT:
        raise ValueError(f"{key!r} of {size} bytes is not a part")
    return PartRef(ObjectKey(key), str(ref["digest"]), size, _natural(ref["node"]), tuple(map(_natural, ref["ranks"])))


def _natural(value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a count")
    return value
