"""Save a model and its optimizer on one mesh, or load them on another and compare with what was saved."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckptstore import CheckpointStore
from tests.ranks import report


def build(kind: str) -> nn.Module:
    """`kind`: dp x tp, as in 2x2; hsdp; ddp; or plain. Widths that hardly divide by anything."""
    model = nn.Sequential(nn.Linear(30, 54), nn.ReLU(), nn.Linear(54, 21), nn.LayerNorm(21))
    if kind == "plain":
        return model
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        return model
    dp, tp = map(int, kind.split("x"))
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Parameters and moments, whole."""
    tensors = list(model.parameters())
    tensors += [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [full(tensor).detach().reshape(-1).tolist() for tensor in tensors]


def main() -> None:
    what, kind, url = sys.argv[1:4]
    dist.init_process_group("gloo")
    torch.manual_seed(11 if what == "save" else 12)
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if what == "save" else 0.2)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointStore(url, chunk_size="64KiB") as store:
        if what == "save":
            torch.manual_seed(5)
            model(torch.randn(4, 30)).square().sum().backward()
            optimizer.step()
            store.save(1, state).wait(60)
        else:
            assert store.load(state).step == 1
            assert optimizer.param_groups[0]["lr"] == 0.1
        report(everything(model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
