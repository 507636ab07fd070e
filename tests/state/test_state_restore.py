from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

from ckptstore.errors import CorruptCheckpoint, StateMismatch
from ckptstore.state import PerRank, Rank0, Sharded, capture, template
from tests.state.memory_catalog import MemoryCatalog, assert_same, bits, load, save

SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": schedules.ConstantLR,
    "LinearLR": schedules.LinearLR,
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": schedules.PolynomialLR,
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.1, 0.5, step_size_up=2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.5, total_steps=9),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.LinearLR(o)], [2]),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.LinearLR(o)]),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, 0.01),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(name: str) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
        return {"m": model, "o": optimizer, "s": SCHEDULERS[name](optimizer)}

    def run(state: dict[str, Any], count: int) -> list[float]:
        rates = []
        for _ in range(count):
            state["o"].step()
            state["s"].step(*([torch.tensor(1.0)] if name == "ReduceLROnPlateau" else []))
            rates.append(state["o"].param_groups[0]["lr"])
        return rates

    state, target = make(), make()
    run(state, 3)
    load(target, save(state))
    assert run(target, 4) == run(state, 4)
    assert_same(state, target)


class Loader:
    """Like a data loader: its state grows, holds tensors, arrays and numbers, and is different on each rank."""

    def __init__(self, position: int = 0) -> None:
        self.state: dict[str, Any] = {}
        if position:
            self.state = {
                "position": position,
                "rank": PerRank(position * 10),
                "seen": Rank0(torch.full((2,), position)),
                "buffers": {"a/b": np.full(3, position), "none": {}},
                "generators": [torch.full((1,), position), ("x", np.float32(position))],
            }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_stateful_objects_get_what_was_saved_whatever_they_hold_now() -> None:
    saved = MemoryCatalog(*(capture({"loader": Loader(5)}, rank=rank) for rank in range(2)))
    for target in (Loader(), Loader(9)):
        assert load({"loader": target}, saved, rank=1, world_size=2) == {}
        state = target.state
        assert set(state) == {"position", "rank", "seen", "buffers", "generators"}
        assert (state["position"], state["rank"]) == (5, 50)
        assert state["seen"].tolist() == [5, 5]
        assert isinstance(state["buffers"]["a/b"], np.ndarray)
        assert state["buffers"]["a/b"].tolist() == [5, 5, 5]
        assert state["buffers"]["none"] == {}
        assert state["generators"][0].tolist() == [5]
        assert state["generators"][1] == ("x", np.float32(5))


def test_grad_scaler_and_empty_states() -> None:
    state: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "off": Loader()}
    target: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu"), "off": Loader(3)}
    load(target, save(state))
    assert target["scaler"].get_scale() == 8.0
    assert target["off"].state == {}


def test_per_rank_and_rank0() -> None:
    def state(fill: int) -> dict[str, Any]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, fill)
        return {"rng": PerRank({"t": torch.full((2,), fill), "n": fill}), "zero": Rank0([fill]), "m": model}

    saved = MemoryCatalog(*(capture(state(rank), rank=rank, per_rank=["m/*"]) for rank in range(2)))
    for rank in range(2):
        target = state(9)
        values = load(target, saved, rank=rank, world_size=2)
        assert values == {"rng": {"n": rank}, "zero": [0]}
        assert target["rng"].value["t"].tolist() == [rank, rank]
        assert target["m"].weight.item() == rank
    target = state(9)
    restore = template(target, saved, rank=2, world_size=3, strict=True, cast=False)
    assert sorted(restore.missing) == ["m/weight", "rng/n", "rng/t"]
    assert saved.fill(restore) == {"zero": [0]}
    assert target["m"].weight.item() == 9


def test_a_new_rank_keeps_a_stateful_of_its_own() -> None:
    saved = save({"loader": PerRank(Loader(5))})
    target = Loader(9)
    restore = template({"loader": PerRank(target)}, saved, rank=1, world_size=2, strict=True, cast=False)
    assert restore.missing == ["loader"]
    saved.fill(restore)
    assert target.state["position"] == 9


def test_all_mismatches_are_told_at_once_and_nothing_is_changed() -> None:
    source = {"m": nn.Linear(2, 3), "t": torch.ones(2), "n": 1, "extra": {"x": torch.ones(1), "y": 2}, "skipped": 5}
    target: dict[str, Any] = {
        "m": nn.Linear(2, 4),
        "t": torch.zeros(2, dtype=torch.float64),
        "n": torch.zeros(1),
        "more": 3,
        "extra": {"x": torch.zeros(1)},
    }
    before = {key: bits(value).tobytes() for key, value in target["m"].state_dict().items()}
    with pytest.raises(StateMismatch) as caught:
        load(target, save(source))
    assert str(caught.value).split("\n") == [
        "the checkpoint does not fit the state in 6 places:",
        "m/weight: shape (3, 2) in the checkpoint, (4, 2) in the state",
        "m/bias: shape (3,) in the checkpoint, (4,) in the state",
        "t: dtype float32 in the checkpoint, float64 in the state; cast=True converts",
        "n: a plain value in the checkpoint, but not in the state",
        "more: not in the checkpoint",
        "extra/y: in the checkpoint, but not in the state",
    ]
    assert before == {key: bits(value).tobytes() for key, value in target["m"].state_dict().items()}


def test_not_strict() -> None:
    source = {"m": nn.Linear(2, 3), "n": 1}
    model = nn.Sequential(nn.Linear(2, 3))
    model.register_buffer("more", torch.zeros(1))
    target: dict[str, Any] = {"m": model, "n": 0, "k": 7, "l": [torch.ones(1)]}
    restore = template(target, save(source), rank=0, world_size=1, strict=False, cast=False)
    assert restore.missing == ["m/0.weight", "m/0.bias", "m/more", "k", "l"]
    assert save(source).fill(restore) == {"n": 1}
    with pytest.raises(StateMismatch, match="m/weight: shape"):
        load({"m": nn.Linear(3, 2)}, save(source), strict=False)


def test_casts_only_when_asked() -> None:
    source = {"t": torch.tensor([1.5, 2.5]), "a": np.ones(2, np.int32), "l": [torch.ones(1, dtype=torch.float16)]}
    target: Any = {"t": torch.zeros(2, dtype=torch.bfloat16), "a": np.zeros(2), "l": [torch.zeros(1)]}
    with pytest.raises(StateMismatch, match="3 places"):
        load(target, save(source))
    load(target, save(source), cast=True)
    assert (target["t"].tolist(), target["a"].tolist(), target["l"][0].item()) == ([1.5, 2.5], [1, 1], 1)
    with pytest.raises(StateMismatch, match="dtype complex64 in the checkpoint, float32 in the state"):
        load({"t": torch.zeros(1)}, save({"t": torch.zeros(1, dtype=torch.complex64)}), cast=True)


def test_arrays_and_tensors_may_take_each_other_s_place() -> None:
    target = torch.zeros(2, dtype=torch.float64)
    load({"x": target}, save({"x": np.ones(2)}))
    array = np.zeros(2)
    load({"x": array}, save({"x": target}))
    assert array.tolist() == [1, 1]


def test_sharded_takes_its_box() -> None:
    parts = [capture({"x": Sharded(torch.full((2, 3), rank), (4, 3), (2 * rank, 0))}, rank=rank) for rank in range(2)]
    target = torch.full((4, 3), 9)
    load({"x": target}, MemoryCatalog(*parts))
    assert target[:, 0].tolist() == [0, 0, 1, 1]


def test_a_value_that_a_type_refuses() -> None:
    class Color(enum.IntEnum):
        RED = 1

    class Colour(enum.IntEnum):
        BLUE = 2

    saved = save({"c": Color.RED})
    assert type(load({"c": Color.RED}, saved)["c"]) is Color
    with pytest.raises(StateMismatch, match=r"c: .*Colour does not take what was saved: 1 is not a valid"):
        load({"c": Colour.BLUE}, saved)


def test_a_corrupt_value_is_named() -> None:
    saved = save({"a": {"b": 1, "t": torch.ones(1)}})
    saved.values["a/b", -1] = b"{"
    with pytest.raises(CorruptCheckpoint, match=r"^a/b: "):
        load({"a": {"b": 1, "t": torch.ones(1)}}, saved)


def test_lists_of_modules_and_plain_values_keep_their_places() -> None:
    state: Any = {"parts": [nn.Linear(1, 1), 3, {"m": nn.Linear(1, 1), "n": 4}]}
    assert load(state, save(state)) == {"parts": [None, 3, {"n": 4}]}
