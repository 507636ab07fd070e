"""Small checkpoints, written straight with the format: what the load tests read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from backends.base import Backend
from ckptstore.format import commit as commits
from ckptstore.format import part as parts
from ckptstore.format.keys import Attempt, Slot, run_key
from ckptstore.format.model import SHARED, VALUE, Box, SliceKey, whole
from ckptstore.format.part import Chunk, Extent, Part
from ckptstore.repo import lineage
from ckptstore.repo.lineage import Run


@dataclass(frozen=True)
class Piece:
    """A slice and its bytes."""

    key: SliceKey
    data: bytes


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def piece(name: str, tensor: torch.Tensor, box: Box | None = None, rank: int = SHARED) -> Piece:
    """`box` of `tensor`, or all of it."""
    shape = tuple(tensor.shape)
    box = box or whole(shape)
    view = tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
    return Piece(SliceKey(name, rank, str(tensor.dtype).removeprefix("torch."), shape, box), raw(view))


def value(name: str, encoded: bytes, rank: int = SHARED) -> Piece:
    return Piece(SliceKey(name, rank, VALUE, (len(encoded),), whole((len(encoded),))), encoded)


def pack(pieces: Iterable[Piece], key: str, size: int) -> tuple[bytes, list[Extent]]:
    """A pack of these pieces: small ones share chunks of up to `size` bytes, large ones are cut at multiples of it."""
    extents: list[Extent] = []
    blob = b"junk"  # chunks need not start at an aligned byte
    shared: list[tuple[Piece, int]] = []

    def flush() -> None:
        nonlocal blob, shared
        if shared:
            data = b"".join(p.data for p, _ in shared)
            chunk = Chunk(blake3(data).digest(), key, len(blob), len(data), len(data))
            extents.extend(Extent(p.key, 0, len(p.data), skip, chunk) for p, skip in shared)
            blob, shared = blob + data, []

    for p in pieces:
        if not p.data:
            extents.append(parts.empty(p.key))
        elif len(p.data) > size:
            flush()
            for start in range(0, len(p.data), size):
                data = p.data[start : start + size]
                chunk = Chunk(blake3(data).digest(), key, len(blob), len(data), len(data))
                extents.append(Extent(p.key, start, len(data), 0, chunk))
                blob += data
        else:
            if sum(len(q.data) for q, _ in shared) + len(p.data) > size:
                flush()
            shared.append((p, sum(len(q.data) for q, _ in shared)))
    flush()
    return blob, extents


def header(attempt: Attempt, rank: int, world_size: int) -> dict[str, Any]:
    fixed: dict[str, Any] = {
        "plan": "p",
        "layouts": {},
        "bytes_state": 1,
        "bytes_written": 1,
        "metrics": None,
        "pin": False,
    }
    return fixed | {
        "step": attempt.step,
        "generation": attempt.generation,
        "run_id": f"run-{attempt.run}",
        "ranks": [rank],
        "world_size": world_size,
    }


async def stream(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def write_run(backend: Backend, run: int = 1, resumed_from: int | None = None) -> None:
    base = None if resumed_from is None else Slot(resumed_from, run - 1, 0)
    await backend.put_if_absent(run_key(run), lineage.encode_run(Run(run, f"run-{run}", resumed_from, base)))


async def write(
    backend: Backend, step: int, nodes: Sequence[Sequence[Piece]], *, run: int = 1, chunk: int = 64, generation: int = 0
) -> Attempt:
    """A committed checkpoint of as many single-rank nodes as there are lists."""
    attempt = Attempt(run, step, step, generation)
    read = []
    for node, pieces in enumerate(nodes):
        key = attempt.pack(node, "a", 0)
        blob, extents = pack(pieces, str(key), chunk)
        await backend.put(key, stream(blob))
        data = parts.encode(Part(header(attempt, node, len(nodes)), extents, []))
        await backend.put_if_absent(attempt.part(node), data)
        read.append((data, parts.decode(data, "part")))
    content = commits.assemble(attempt, read)
    assert isinstance(content, commits.Commit), content
    await backend.put_if_absent(attempt.slot.key, commits.encode(content))
    return attempt


async def replace(backend: Backend, key: Any, change: Any) -> None:
    """Damage: the object becomes ``change(its bytes)``, or goes if that is None."""
    data = change(await backend.get(key))
    await backend.delete(key)
    if data is not None:
        await backend.put_if_absent(key, data)


def flip(data: bytes, at: int = -1) -> bytes:
    """The bytes with one bit changed."""
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)
