"""A checkpoint in memory: what ranks captured, put together as a loader would."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckptstore.format.model import Box
from ckptstore.state import Captured, Restore, TensorInfo, capture, template


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, start + n) for start, n in zip(box.offset, box.shape, strict=True))]


class MemoryCatalog:
    """Implements Catalog. Checks that boxes tile each tensor and that replicas are equal, bit by bit."""

    def __init__(self, *captured: Captured) -> None:
        self.world_size = len(captured)
        self.infos: dict[tuple[str, int], TensorInfo] = {}
        self.content: dict[tuple[str, int], torch.Tensor] = {}
        self.values: dict[tuple[str, int], bytes] = {}
        covered: dict[tuple[str, int], torch.Tensor] = {}
        for one in captured:
            for value in one.values:
                at = (value.name, value.rank)
                assert value.policy == "rank0" or self.values.get(at, value.data) == value.data, at
                self.values.setdefault(at, value.data)
            for piece in one.tensors:
                key, at = piece.key, (piece.key.name, piece.key.rank)
                assert tuple(piece.tensor.shape) == key.box.shape and not piece.tensor.requires_grad
                assert str(piece.tensor.dtype) == f"torch.{key.dtype}"
                if at not in self.content:
                    self.content[at] = torch.empty(key.shape, dtype=piece.tensor.dtype)
                    covered[at] = torch.zeros(key.shape, dtype=torch.bool)
                known = self.infos.get(at)
                sharded = key.box.shape != key.shape or (known is not None and known.sharded)
                self.infos[at] = TensorInfo(key.dtype, key.shape, piece.numpy, sharded)
                held, seen = view(self.content[at], key.box), view(covered[at], key.box)
                if not seen.numel():
                    continue
                assert bool(seen.all()) == bool(seen.any()), f"{at}: boxes overlap"
                if not seen.any():
                    held.copy_(piece.tensor)
                    seen.fill_(True)
                elif piece.policy == "replica":
                    assert np.array_equal(bits(held), bits(piece.tensor)), f"{at}: replicas differ"
        assert all(seen.all() for seen in covered.values()), "a tensor is not covered"
        self.sorted = sorted({name for name, _ in (*self.infos, *self.values)})

    def names(self, prefix: str) -> Iterable[str]:
        if prefix in {*self.sorted[(at := bisect.bisect_left(self.sorted, prefix)) : at + 1]}:
            yield prefix
        at = bisect.bisect_left(self.sorted, prefix + "/")
        while at < len(self.sorted) and self.sorted[at].startswith(prefix + "/"):
            yield self.sorted[at]
            at += 1

    def tensor(self, name: str, rank: int) -> TensorInfo | None:
        return self.infos.get((name, rank))

    def has_value(self, name: str, rank: int) -> bool:
        return (name, rank) in self.values

    def fill(self, restore: Restore) -> dict[str, Any]:
        for target in restore.targets:
            key = target.key
            assert tuple(target.tensor.shape) == key.box.shape
            target.tensor.copy_(view(self.content[key.name, key.rank], key.box))
        return restore.apply({at: self.values[at] for at in restore.values})


def save(state: Mapping[str, object], **options: Any) -> MemoryCatalog:
    return MemoryCatalog(capture(state, rank=0, **options))


def load(
    state: Mapping[str, object],
    catalog: MemoryCatalog,
    *,
    rank: int = 0,
    world_size: int = 1,
    strict: bool = True,
    cast: bool = False,
) -> dict[str, Any]:
    return catalog.fill(template(state, catalog, rank=rank, world_size=world_size, strict=strict, cast=cast))


def content(captured: Captured) -> dict[Any, Any]:
    """A capture as something to compare: two are equal if every leaf is, bit by bit."""
    made: dict[Any, Any] = {(s.key, s.policy, s.numpy): bits(s.tensor).tobytes() for s in captured.tensors}
    made.update({(v.name, v.rank, v.policy): v.data for v in captured.values})
    return made


def assert_same(one: Mapping[str, object], other: Mapping[str, object], ranks: Sequence[int] = (0,)) -> None:
    for rank in ranks:
        left, right = content(capture(one, rank=rank)), content(capture(other, rank=rank))
        assert left.keys() == right.keys(), left.keys() ^ right.keys()
        assert not [key for key in left if left[key] != right[key]]
