"""Which boxes of a tensor a rank's part of a DTensor is."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ckptstore.errors import UnsupportedValue
from ckptstore.format.model import Box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Run = tuple[int, int]  #: start and length, in elements, of what one dimension holds without a gap


@dataclass(frozen=True, slots=True)
class Geometry:
    """The local part of a DTensor: its shape, and each (box in the whole, box in the local part)."""

    local_shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]


def is_dtensor(obj: object) -> TypeGuard[DTensor]:
    module: Any = sys.modules.get("torch.distributed.tensor")  # takes half a second to import: not for this question
    return module is not None and isinstance(obj, module.DTensor)


def local_part(tensor: DTensor, name: str) -> tuple[torch.Tensor, Geometry | None]:
    """The local tensor and its geometry; no geometry on a rank outside the mesh.

    Raises UnsupportedValue for placements other than Shard, Replicate and _StridedShard, and where the local tensor
    has not the shape that they imply.
    """
    spec: Any = tensor._spec
    local: torch.Tensor = tensor._local_tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()  # type: ignore[attr-defined]
    try:
        made = geometry(tuple(tensor.shape), spec.mesh, spec.placements, getattr(spec, "shard_order", None))
    except UnsupportedValue as error:
        raise UnsupportedValue(f"{name}: {error}") from None
    if made is not None and local.shape != made.local_shape and (local.numel() or made.boxes):
        raise UnsupportedValue(
            f"{name}: this rank's part has the shape {tuple(local.shape)}, but {spec.placements} of "
            f"{tuple(tensor.shape)} imply {made.local_shape}; choose sizes that the mesh divides"
        )
    return local, made


@lru_cache(maxsize=1 << 14)
def geometry(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], order: Any = None) -> Geometry | None:
    """What this rank holds of a tensor of `shape`; `order` is torch's shard_order. None outside the mesh."""
    splits = list(_splits(placements, order))
    _check_strides(placements, mesh.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    held: list[list[Run]] = [[(0, size)] for size in shape]
    for mesh_dim in splits:
        placement, parts, index = placements[mesh_dim], mesh.shape[mesh_dim], coordinate[mesh_dim]
        dim = placement.dim % len(shape)
        held[dim] = _part(held[dim], _factor(placement), parts, index)
    local_shape = tuple(sum(n for _, n in runs) for runs in held)
    if 0 in local_shape:
        return Geometry(local_shape, ())
    placed = [list(zip(runs, _starts(runs), strict=True)) for runs in held]
    boxes = []
    for combination in itertools.product(*placed):
        extent = tuple(n for (_, n), _ in combination)
        outer = Box(tuple(start for (start, _), _ in combination), extent)
        boxes.append((outer, Box(tuple(start for _, start in combination), extent)))
    return Geometry(local_shape, tuple(boxes))


def _splits(placements: tuple[Any, ...], order: Any) -> Iterator[int]:
    """The mesh dimensions that split the tensor, in the sequence in which they do."""
    for placement in placements:
        if type(placement).__name__ not in ("Shard", "_StridedShard", "Replicate"):
            raise UnsupportedValue(
                f"a DTensor with the placement {placement} cannot be saved; redistribute it to Shard or Replicate"
            )
    sharding = [dim for dim, placement in enumerate(placements) if type(placement).__name__ != "Replicate"]
    yield from sharding if order is None else (dim for entry in order for dim in entry.mesh_dims)


def _check_strides(placements: tuple[Any, ...], mesh_shape: tuple[int, ...]) -> None:
    """Refuse strided shards of one dimension that are no nesting of splits, which torch gathers not as it cut them."""
    for dim in {placement.dim for placement in placements if type(placement).__name__ == "_StridedShard"}:
        splits = [(mesh_shape[i], _factor(p)) for i, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        sizes: list[int] = []  # of the mesh dimensions in the sequence in which they split
        for size, factor in reversed(splits):
            before = next((i for i in range(len(sizes) + 1) if math.prod(sizes[:i]) == factor), None)
            if before is None and sum(factor > 1 for _, factor in splits) > 1:
                raise UnsupportedValue(
                    f"a DTensor with the placements {placements} cannot be saved: where its parts lie is not clear; "
                    "redistribute it to Shard or Replicate"
                )
            sizes.insert(before or 0, size)


def _factor(placement: Any) -> int:
    return int(getattr(placement, "split_factor", 1))


def _part(runs: list[Run], factor: int, parts: int, index: int) -> list[Run]:
    """Part `index` of `parts`, as torch.chunk cuts; a strided shard first cuts into `factor` and takes it from each."""
    total = sum(n for _, n in runs)
    taken: list[Run] = []
    for piece in range(factor):
        start, length = _chunk(total, factor, piece)
        skip, count = _chunk(length, parts, index)
        taken += _cut(runs, start + skip, count)
    merged: list[Run] = []
    for start, length in taken:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _chunk(total: int, parts: int, index: int) -> Run:
    size = -(-total // parts)
    start = min(total, size * index)
    return start, min(total, start + size) - start


def _cut(runs: list[Run], start: int, count: int) -> Iterator[Run]:
    """Elements `start` to `start + count` of the runs put end to end."""
    for (first, length), begin in zip(runs, _starts(runs), strict=True):
        low, high = max(start, begin), min(start + count, begin + length)
        if low < high:
            yield first + low - begin, high - low


def _starts(runs: list[Run]) -> list[int]:
    return list(itertools.accumulate((n for _, n in runs), initial=0))[:-1]


@lru_cache(maxsize=256)
def describe_mesh(mesh: Any) -> dict[str, Any]:
    """A device mesh as JSON."""
    names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
    return {"names": names, "shape": list(mesh.shape), "ranks": mesh.mesh.flatten().tolist()}


@lru_cache(maxsize=1 << 12)
def describe_placements(placements: tuple[Any, ...]) -> list[str]:
    """Placements as torch's constructors would be written."""
    return [_describe(placement) for placement in placements]


def _describe(placement: Any) -> str:
    kind = type(placement).__name__
    if kind == "_StridedShard":
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    return f"Shard({placement.dim})" if kind == "Shard" else f"{kind}()"
