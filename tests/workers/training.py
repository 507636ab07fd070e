"""Train a small model; with saves or without, the weights must come out the same to the last bit."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptstore import CheckpointStore, PerRank
from tests.ranks import report

STEPS = 6


def train(store: CheckpointStore | None) -> list[list[float]]:
    """Weights after training; with a store, saved at step 0 and after each step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(33, 65), nn.Dropout(0.1), nn.Linear(65, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def save(step: int) -> None:
        if store is not None:
            rng = PerRank(torch.get_rng_state())
            store.save(step, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": rng})

    torch.manual_seed(4 + dist.get_rank())
    save(0)
    for step in range(STEPS):
        model(torch.randn(8, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        save(step + 1)
    weights: list[list[float]] = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        weights.append(parameter.to_local().detach().reshape(-1).tolist())
    return weights


def preempted(store: CheckpointStore) -> list[bool]:
    """Rank 1 gets SIGTERM at step 3."""
    answers = []
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        answers.append(store.preempted(step))
    return answers


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"without": train(None)}
    with CheckpointStore(sys.argv[1]) as store:
        found["with"] = train(store)
        store.wait(60)
        found["steps"] = store.steps()
        found["preempted"] = preempted(store)
    report(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
