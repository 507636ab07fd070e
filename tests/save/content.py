"""What the crash tests save: tensors that follow from the step, so that whoever loads knows what must be there."""

from __future__ import annotations

import torch

ROWS = 12 * 341  # 32 MiB, for 1 to 4 ranks: an upload takes long enough to be caught in the middle


def sharded(step: int) -> torch.Tensor:
    """The whole of what each rank has some rows of."""
    return _random(step, ROWS, 1024)


def same(step: int) -> torch.Tensor:
    """What every rank has."""
    return _random(step + 1000, 1000, 3)


def mine(step: int, rank: int) -> torch.Tensor:
    """What each rank has one of its own of."""
    return _random(step * 100 + rank + 2000, 777)


def blank() -> dict[str, torch.Tensor]:
    """Room for a step in a process that has no ranks."""
    return {name: torch.zeros_like(tensor) for name, tensor in expected(0).items()}


def expected(step: int) -> dict[str, torch.Tensor]:
    """What a process without ranks finds in the checkpoint of this step."""
    return {"sharded": sharded(step), "same": same(step), "mine": mine(step, 0)}


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 62), 1 << 62, shape, generator=torch.Generator().manual_seed(seed))
