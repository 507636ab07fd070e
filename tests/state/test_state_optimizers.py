from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

from ckptstore.errors import StateMismatch, UnsupportedValue
from ckptstore.state import capture
from tests.state.memory_catalog import assert_same, load, save

OPTIMIZERS = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind not in (optim.Optimizer, optim.SparseAdam)
]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def make(kind: Any, model: nn.Module, **options: Any) -> Any:
    parameters = [p for p in model.parameters() if kind is not optim.Muon or p.ndim == 2]
    if kind is optim.SGD:
        options.setdefault("momentum", 0.9)
    return kind(parameters, lr=0.01, **options)


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = torch.randn(8, 6)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(inputs).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_exactly(kind: Any) -> None:
    model, other = net(), net(1)
    optimizer, loaded = make(kind, model), make(kind, other)
    for seed in (1, 2):
        step(model, optimizer, seed)
    state, target = {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": loaded}
    assert load(target, save(state)) == {}
    assert_same(state, target)
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(other, loaded, seed)
    assert_same(state, target)
    load(target, save(state))  # now that there is state, it is filled in place
    assert_same(state, target)


def test_it_equals_torch_s_own_round_trip() -> None:
    model = net()
    optimizer, ours, theirs = (optim.NAdam(model.parameters()) for _ in range(3))
    step(model, optimizer, 1)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    load({"m": model, "o": ours}, save({"m": model, "o": optimizer}))
    for param in model.parameters():
        assert set(ours.state[param]) == set(theirs.state[param])
        for key, value in theirs.state[param].items():
            got = ours.state[param][key]
            assert (got.dtype, got.device, got.stride()) == (value.dtype, value.device, value.stride())
            assert torch.equal(got, value)
    assert ours.param_groups == theirs.param_groups


def test_names() -> None:
    model = nn.ModuleDict({"a/b": nn.Linear(1, 1, bias=False)})
    optimizer = optim.AdamW(model.parameters())
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1, 1)
    optimizer.step()
    made = capture({"opt": [optimizer], "x": {"model": model}}, rank=0)
    qualified = "x.model.a~1b.weight"
    assert [s.key.name for s in made.tensors][1:] == [
        f"opt/0/state/{qualified}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    assert [v.name for v in made.values] == [f"opt/0/group/{qualified}"]


def test_options_of_a_group_are_one_object_for_all() -> None:
    model = net()
    made = capture({"m": model, "o": optim.SGD(model.parameters(), lr=0.5)}, rank=0)
    assert len(made.values) == 6
    assert len({id(v.data) for v in made.values}) == 1


def test_an_optimizer_without_state_stays_without() -> None:
    model = net()
    optimizer = optim.Adam(model.parameters(), lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    made = capture({"m": model, "o": optimizer}, rank=0)
    assert not [s for s in made.tensors if s.key.name.startswith("o/")]
    assert len(optimizer.state) == 0
    assert optimizer.state_dict() == before
    stepped = optim.Adam(model.parameters())
    step(model, stepped, 1)
    load({"m": model, "o": stepped}, save({"m": model, "o": optimizer}))
    assert len(stepped.state) == 0
    assert stepped.param_groups[0]["lr"] == 0.5


def test_groups_and_their_order_may_change_as_long_as_options_agree() -> None:
    model, other = net(), net(1)
    params, others = list(model.parameters()), list(other.parameters())
    optimizer = optim.AdamW([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}])
    step(model, optimizer, 1)
    saved = save({"m": model, "o": optimizer})
    loaded = optim.AdamW([{"params": others[3:]}, {"params": others[2:3]}, {"params": others[:2][::-1]}])
    load({"m": other, "o": loaded}, saved)
    assert [group["lr"] for group in loaded.param_groups] == [0.2, 0.2, 0.1]
    assert_same({"m": model, "o": optimizer}, {"m": other, "o": loaded})
    with pytest.raises(StateMismatch, match="had different options when saved, but are in one group now"):
        load({"m": other, "o": optim.AdamW(others)}, saved)


def test_options_that_are_tensors() -> None:
    model, other = net(), net(1)
    optimizer = optim.Adam(model.parameters(), lr=torch.tensor(0.25))
    loaded = optim.Adam(other.parameters(), lr=torch.tensor(0.5))
    rate = loaded.param_groups[0]["lr"]
    load({"m": other, "o": loaded}, save({"m": model, "o": optimizer}))
    assert loaded.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_state_keeps_the_dtype_it_was_saved_in() -> None:
    model = net().bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.randn_like(param, dtype=torch.float32)
    loaded = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    load({"m": model, "o": loaded}, save({"m": model, "o": optimizer}))
    assert all(entry["momentum_buffer"].dtype == torch.float32 for entry in loaded.state.values())


def test_entries_that_were_not_saved_go() -> None:
    model, other = net(), net()
    optimizer, loaded = optim.SGD(model.parameters(), momentum=0.9), optim.SGD(other.parameters(), momentum=0.9)
    step(model, optimizer, 1)
    step(other, loaded, 1)
    first = next(other.parameters())
    loaded.state[first]["more"] = torch.ones(1)
    loaded.state[first]["plain"] = 3
    load({"m": other, "o": loaded}, save({"m": model, "o": optimizer}))
    assert list(loaded.state[first]) == ["momentum_buffer"]


def test_a_wrapper_that_is_no_module_lends_its_names() -> None:
    class Wrapper:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def state_dict(self) -> Any:
            return self.model.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.model.load_state_dict(state)

    model, other = net(), net(1)
    optimizer, loaded = optim.Adam(model.parameters()), optim.Adam(other.parameters())
    step(model, optimizer, 1)
    state: dict[str, Any] = {"o": optimizer, "m": Wrapper(model)}
    assert "o/group/m.0.weight" in [v.name for v in capture(state, rank=0).values]
    target = {"o": loaded, "m": Wrapper(other)}
    load(target, save(state))
    assert_same(state, target)


def test_a_parameter_in_no_module_is_refused() -> None:
    model = net()
    optimizer = optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    with pytest.raises(UnsupportedValue, match=r"o: parameter 0 of group 1, of shape \(3, 5\), is in no module"):
        capture({"m": model[0], "o": optimizer}, rank=0)


@pytest.mark.parametrize("key", ["shared", torch.ones(3)])
def test_state_of_no_parameter_is_refused(key: Any) -> None:
    model = net()
    optimizer = optim.SGD(model.parameters())
    optimizer.state[key]["x"] = 1
    with pytest.raises(UnsupportedValue, match=r"o/state: the entry of ('shared'|a tensor of shape \(3,\))"):
        capture({"m": model, "o": optimizer}, rank=0)


def test_mismatches_of_parameters() -> None:
    model, small = net(), nn.Sequential(nn.Linear(6, 5))
    optimizer = optim.Adam(model.parameters())
    step(model, optimizer, 1)
    saved = save({"m": model, "o": optimizer})
    with pytest.raises(StateMismatch) as caught:
        load({"m": small, "o": optim.Adam(small.parameters())}, saved)
    assert "o/state/m.2.weight/exp_avg: in the checkpoint, but not in the state" in str(caught.value)
    load({"m": small, "o": optim.Adam(small.parameters())}, saved, strict=False)
    more = nn.Sequential(*net(), nn.Linear(3, 3))
    loaded = optim.Adam(more.parameters(), lr=0.5)
    with pytest.raises(StateMismatch, match=r"o/group/m\.3\.bias: not in the checkpoint"):
        load({"m": more, "o": loaded}, saved)
