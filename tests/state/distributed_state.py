"""Run by torchrun on four ranks: boxes of DTensors tile their tensors, match full_tensor(), and can be filled again."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.errors import StateMismatch, UnsupportedValue
from ckptstore.format.model import Box
from ckptstore.state import Captured, PerRank, capture
from ckptstore.state.boxes import geometry
from tests.state.memory_catalog import MemoryCatalog, assert_same, content, load


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, wide)
        self.down = nn.Linear(wide, 6)
        self.norm = nn.LayerNorm(6)


def plain(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(7), Block(9), nn.Linear(6, 5))


def fsdp_tp(seed: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = plain(seed)
    for block in list(model)[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def hsdp(seed: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(plain(seed), mesh=mesh)


def fsdp(seed: int) -> Any:
    return fully_shard(plain(seed), mesh=init_device_mesh("cpu", (4,)))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    """Steps with gradients that differ from element to element."""
    for _ in range(steps):  # torch itself cannot run a forward with uneven tensor parallelism
        for param in model.parameters():
            param.grad = param.detach().clone() + 0.1
        optimizer.step()


def gather(captured: Captured) -> MemoryCatalog:
    """All ranks' captures as one checkpoint, which checks that boxes tile and that replicas are equal."""
    data = io.BytesIO()
    torch.save(captured, data)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, data.getvalue())
    return MemoryCatalog(*(torch.load(io.BytesIO(one), weights_only=False) for one in everyone))


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_models(rank: int) -> None:
    model = fsdp_tp(1)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    state = {"model": model, "optimizer": optimizer}
    made = capture(state, rank=rank)
    assert any("_StridedShard(0, split_factor=2)" in how for _, how in made.layouts["tensors"].values())
    assert {"names": ["dp", "tp"], "shape": [2, 2], "ranks": [0, 1, 2, 3]} in made.layouts["meshes"]
    saved = gather(made)
    for name, param in model.named_parameters():
        assert torch.equal(saved.content[f"model/{name}", -1], full(param)), name
        for key, value in optimizer.state[param].items():
            assert torch.equal(saved.content[f"optimizer/state/model.{name}/{key}", -1], full(value)), (name, key)

    for other in (fsdp_tp(2), hsdp(2), fsdp(2), plain(2)):
        loaded = optim.AdamW(other.parameters(), lr=0.5)
        target = {"model": other, "optimizer": loaded}
        load(target, saved, rank=rank, world_size=4)
        again = gather(capture(target, rank=rank))
        assert again.content.keys() == saved.content.keys()
        assert all(torch.equal(again.content[at], saved.content[at]) for at in saved.content)
        assert again.values == saved.values
        for param in other.parameters():
            for key, value in loaded.state[param].items():
                assert key == "step" or (type(value), getattr(value, "placements", None)) == (
                    type(param.data),
                    getattr(param, "placements", None),
                )
        train(other, loaded, 1)
    same = fsdp_tp(3)
    loaded = optim.AdamW(same.parameters(), lr=0.5)
    load({"model": same, "optimizer": loaded}, saved, rank=rank, world_size=4)
    train(model, optimizer, 2)
    train(same, loaded, 2)
    assert_same(state, {"model": same, "optimizer": loaded}, ranks=(rank,))


def check_unsharded_is_resharded(rank: int) -> None:
    model = fsdp_tp(1)
    before = content(capture({"m": model}, rank=rank))
    model[0].unshard()
    assert not isinstance(model[0].norm.weight, DTensor)
    assert content(capture({"m": model}, rank=rank)) == before


def check_geometry(rank: int) -> None:
    """Every pair of placements, against what torch computes and against what it gathers."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    kinds = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    state: dict[str, Any] = {}
    for shape in [(8, 6), (7, 5), (1, 3), (13, 2), (2, 9), (0, 4), (5, 0)]:
        for pair in itertools.product(kinds, kinds):
            if pair[0] == pair[1] and type(pair[0]) is _StridedShard:
                continue  # refused, see below
            made = geometry(shape, mesh, pair)
            assert made is not None
            local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, pair)
            assert made.local_shape == tuple(local_shape), (shape, pair)
            if made.boxes:
                assert made.boxes[0][0].offset == tuple(offset), (shape, pair)
            coordinate = mesh.get_coordinate() or ()
            part = sum(10**i * (c + 1) for i, c in enumerate(coordinate) if pair[i] != Replicate())
            local = torch.arange(math.prod(made.local_shape)).reshape(made.local_shape) + 100 * part
            state[f"{shape}{pair}"] = DTensor.from_local(
                local, mesh, pair, shape=torch.Size(shape), stride=(shape[1], 1), run_check=False
            )
    saved = gather(capture({"x": state}, rank=rank))
    for key, tensor in state.items():
        if {Shard(1), kinds[-1]} == set(tensor.placements):
            continue  # torch's own collectives fail here: 3 is not how many parts the other split makes
        assert torch.equal(saved.content[f"x/{key}", -1], tensor.full_tensor()), key
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    load({"x": target}, saved, rank=rank, world_size=4)
    assert_same({"x": state}, {"x": target}, ranks=(rank,))


def check_several_boxes(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    spread = distribute_tensor(torch.arange(24.0), mesh, [_StridedShard(0, split_factor=3)])
    made = capture({"x": spread}, rank=rank).tensors
    assert [piece.key.box for piece in made] == [Box((8 * i + 2 * rank,), (2,)) for i in range(3)]


def check_submesh(rank: int) -> None:
    mesh = DeviceMesh("cpu", [1, 3])
    spread = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    made = capture({"x": spread}, rank=rank)
    assert [piece.key.box for piece in made.tensors] == {1: [Box((0,), (3,))], 3: [Box((3,), (2,))]}.get(rank, [])
    saved = gather(made)
    target = distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    load({"x": target}, saved, rank=rank, world_size=4)
    assert torch.equal(target.to_local(), spread.to_local())
    saved = gather(capture({"x": PerRank(spread)}, rank=rank))
    assert sorted(saved.infos) == [("x", 1), ("x", 3)]
    target = distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    load({"x": PerRank(target)}, saved, rank=rank, world_size=4)
    assert torch.equal(target.to_local(), spread.to_local())


def check_refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    lying = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size([8]), stride=(1,))
    strided = _StridedShard(0, split_factor=2)
    unclear = DTensor.from_local(torch.ones(2), square, [strided, strided], shape=torch.Size([8]), stride=(1,))
    for tensor, why in [
        (partial, "a DTensor with the placement P"),
        (lying, "this rank's part has the shape (3,)"),
        (unclear, "where its parts lie is not clear"),
    ]:
        for state in ({"x": tensor}, {"x": [tensor]}):
            try:
                capture(state, rank=rank)
            except UnsupportedValue as error:
                assert str(error).startswith("x"), error
                assert why in str(error), error
            else:
                raise AssertionError(f"saved, although {why}")


def check_what_hides_its_state(rank: int) -> None:
    model = plain(1)
    hiding = ZeroRedundancyOptimizer(model.parameters(), optim.Adam)
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    for state in ({"m": model, "x": hiding}, {"x": nn.Sequential(flat)}):
        try:
            capture(state, rank=rank)
        except UnsupportedValue as error:
            assert str(error).startswith("x: "), error
            assert "use fully_shard (FSDP2)" in str(error), error
        else:
            raise AssertionError("what it holds was lost")


def check_state_of_another_shape(rank: int) -> None:
    """Like Adafactor's factors: sharded, but not like their parameter."""
    model = fsdp(1)
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    param = next(iter(model.parameters()))
    mesh = param.device_mesh
    optimizer.state[param]["row"] = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    saved = gather(capture({"m": model, "o": optimizer}, rank=rank))
    fresh = optim.SGD(model.parameters(), momentum=0.9)
    try:
        load({"m": model, "o": fresh}, saved, rank=rank, world_size=4)
    except StateMismatch as error:
        assert "o/state/m.0.up.weight/row: saved sharded, of shape (7,)" in str(error), error
    else:
        raise AssertionError("its placement was guessed")
    optimizer.state[param]["row"] = distribute_tensor(torch.zeros(7), mesh, [Shard(0)])
    load({"m": model, "o": optimizer}, saved, rank=rank, world_size=4)
    assert full(optimizer.state[param]["row"]).tolist() == list(range(7))


def check_stateful_with_dtensors(rank: int) -> None:
    class Ema:
        def __init__(self, fill: float) -> None:
            mesh = init_device_mesh("cpu", (4,))
            self.state: Any = {"w": distribute_tensor(torch.full((6, 2), fill), mesh, [Shard(0)]), "n": fill}

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    source, target = Ema(2.0), Ema(0.0)
    load({"ema": target}, gather(capture({"ema": source}, rank=rank)), rank=rank, world_size=4)
    assert target.state["w"].placements == source.state["w"].placements
    assert_same({"ema": source}, {"ema": target}, ranks=(rank,))


def check_ddp(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(plain(1))
    other = nn.parallel.DistributedDataParallel(plain(2))
    made = capture({"model": model}, rank=rank)
    assert made.tensors[0].key.name == "model/0.up.weight"
    load({"model": other}, gather(made), rank=rank, world_size=4)
    assert_same({"model": model}, {"model": other})


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    me = dist.get_rank()
    check_models(me)
    check_unsharded_is_resharded(me)
    check_geometry(me)
    check_several_boxes(me)
    check_submesh(me)
    check_refusals(me)
    check_what_hides_its_state(me)
    check_state_of_another_shape(me)
    check_stateful_with_dtensors(me)
    check_ddp(me)
    dist.barrier()
    if me == 0:
        print("all checks passed")
    dist.destroy_process_group()
