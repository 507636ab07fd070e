"""Save one of several kinds of parallel state twice, and report what was owned, copied and written."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptstore import CheckpointStore
from tests.ranks import report


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width + 2), nn.Linear(4 * width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def build(kind: str, width: int = 256, depth: int = 20) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(width) for _ in range(depth)))
    world = dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def unique_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of the state: each tensor counted once, in its global shape."""
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def owned(store: CheckpointStore) -> tuple[dict[str, int], list[str]]:
    """Bytes that this rank writes of each set of replicas, and the grid of its chunks."""
    planner = store._saver._planner
    assert planner is not None
    assert planner.current is not None
    loads: dict[str, int] = {}
    grid = []
    for chunk in planner.current.rank_plan.chunks:
        holders = str(planner.holders[chunk.pieces[0].key])
        loads[holders] = loads.get(holders, 0) + chunk.size
        grid.append(repr(chunk.pieces))
    return loads, grid


def main() -> None:
    dist.init_process_group("gloo")
    kind, url = sys.argv[1:3]
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with CheckpointStore(url, chunk_size="1MiB") as store:
        first = store.save(1, state)
        first.wait(60)
        loads, grid = owned(store)
        collectives = store.group.collectives
        blocks = [module for module in model.modules() if isinstance(module, Block)]
        with torch.no_grad():  # a tenth of the tensors: parameters and their optimizer state
            for parameter in [p for block in blocks[:2] for p in block.parameters()]:
                for tensor in [parameter, *optimizer.state[parameter].values()]:
                    tensor.add_(0.25)
        second = store.save(2, state)
        second.wait(60)
        report(
            {
                "first": vars(first.stats),
                "second": vars(second.stats),
                "unique": unique_bytes(model, optimizer),
                "owned": loads,
                "grid": grid,
                "collectives": store.group.collectives - collectives,
            }
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
