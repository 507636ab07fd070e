"""What is saved comes back bit for bit, through a real agent and a real disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptstore import CheckpointStore, Rank0, UnsupportedValue
from ckptstore.format.model import ITEMSIZE


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, runtime_dir: Path) -> Iterator[CheckpointStore]:
    url = str(tmp_path / "store") if request.param == "disk" else f"memory://{tmp_path.name}"
    with CheckpointStore(url, timeout=60) as opened:
        yield opened


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: str, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * ITEMSIZE[dtype]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_element_type_and_layout(store: CheckpointStore) -> None:
    def make() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for dtype in ITEMSIZE:
            x = random_bits(dtype, 12, 10)
            cases = {"plain": x, "large": random_bits(dtype, 300, 70), "zero-d": random_bits(dtype)}
            cases |= {"empty": random_bits(dtype, 0, 5), "transposed": random_bits(dtype, 9, 8).t()}
            cases |= {"strided": random_bits(dtype, 12, 10)[::2, 1::3], "part": random_bits(dtype, 12, 10)[3:5]}
            state[dtype] = cases
        return state

    saved, other = make(), make()
    store.save(1, saved).wait(60)
    store.load(other)
    for dtype, cases in saved.items():
        for name, tensor in cases.items():
            assert bits(other[dtype][name]) == bits(tensor), (dtype, name)


def test_plain_values_and_arrays(store: CheckpointStore) -> None:
    values: dict[str, Any] = {
        "none": None,
        "flag": True,
        "big": 1 << 300,
        "float": [0.1, -0.0, float("inf"), float("nan")],
        "text": "Grüße \0 \ud800",
        "bytes": b"\0\xff",
        "tuple": (1, (2, [3])),
        "counter": Counter(a=1),
        "ints": {1: "a", -5: None},
    }
    array = np.arange(12, dtype=np.float16).reshape(3, 4)
    other = np.zeros_like(array)
    store.save(1, {"values": values, "array": array, "first": Rank0("x")}).wait(60)
    found = store.load({"values": dict.fromkeys(values), "array": other, "first": Rank0("")}).values
    assert repr(found["values"]) == repr(values)
    assert found["first"] == "x"
    assert (other == array).all()


def test_tied_weights_are_stored_once(store: CheckpointStore) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    handle = store.save(1, {"model": model})
    handle.wait(60)
    assert handle.stats.bytes_written == 500 * 64 * 4
    store.load({"model": other})
    assert torch.equal(other.head.weight, model.head.weight)
    assert other.head.weight is other.embed.weight


def test_a_second_save_writes_what_changed(store: CheckpointStore) -> None:
    state = {f"t{i}": torch.randn(200, 100) for i in range(50)}
    store.save(1, state).wait(60)
    for i in range(5):
        state[f"t{i}"].add_(1)
    handle = store.save(2, state)
    handle.wait(60)
    assert handle.stats.bytes_written == 5 * 200 * 100 * 4
    third = store.save(3, state)
    third.wait(60)
    assert third.stats.bytes_written == 0
    other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    store.load(other)
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())


def test_the_snapshot_is_of_the_moment_save_returned(store: CheckpointStore) -> None:
    x = torch.zeros(1 << 20)
    handles = []
    for step in range(8):
        x.fill_(step)
        handles.append(store.save(step, {"x": x}))
    x.fill_(-1)
    for handle in handles:
        handle.wait(60)
    for step in range(8):
        y = torch.empty_like(x)
        store.load({"x": y}, step=step)
        assert (y == step).all()


def test_structure_may_change_between_saves(store: CheckpointStore) -> None:
    """An optimizer has no state before its first step, and a model may grow an adapter."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    store.save(0, {"model": model, "optimizer": optimizer}).wait(60)
    assert not optimizer.state
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    store.save(1, {"model": model, "optimizer": optimizer}).wait(60)
    store.save(2, {"model": model, "optimizer": optimizer, "extra": torch.ones(3)}).wait(60)
    fresh = nn.Linear(8, 8)
    again = torch.optim.AdamW(fresh.parameters())
    store.load({"model": fresh, "optimizer": again}, step=1)
    for parameter, original in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, original)
        for name, value in optimizer.state[original].items():
            assert torch.equal(again.state[parameter][name], value)
    store.load({"model": fresh, "optimizer": again}, step=0)
    assert not any(again.state.values())


@pytest.mark.parametrize(
    "bad", [object(), {1, 2}, lambda: 1, torch.zeros(2).to_sparse(), torch.empty(2, device="meta")]
)
def test_what_cannot_be_saved_is_refused_by_path(store: CheckpointStore, bad: object) -> None:
    with pytest.raises(UnsupportedValue, match="a/b"):
        store.save(1, {"fine": 1, "a": {"b": bad}})
    assert store.steps() == []
    store.save(1, {"fine": 1}).wait(60)
    with pytest.raises(UnsupportedValue, match="a/b"):
        store.save(2, {"fine": 1, "a": {"b": bad}})
    store.save(2, {"fine": 1}).wait(60)
    assert store.steps() == [1, 2]
