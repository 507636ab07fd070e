from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, spectral_norm

from ckptstore.errors import StateMismatch, UnsupportedValue
from ckptstore.state import capture
from ckptstore.state.modules import walk
from tests.state.memory_catalog import assert_same, load, save


def net() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def names(state: Any, **options: Any) -> Any:
    made = capture(state, rank=0, **options)
    return [s.key.name for s in made.tensors] + [v.name for v in made.values]


def test_names_and_content_are_those_of_state_dict() -> None:
    model = net()
    made = capture({"m": model}, rank=0)
    assert {s.key.name: s.tensor.tolist() for s in made.tensors} == {
        f"m/{key}": value.tolist() for key, value in model.state_dict().items()
    }
    assert {s.key.name for s in made.tensors if s.policy == "buffer"} == {
        "m/1.running_mean",
        "m/1.running_var",
        "m/1.num_batches_tracked",
    }
    assert not walk(model, "m").saves_itself and not walk(model, "m").loads_itself


def test_wrappers_leave_no_trace() -> None:
    plain: Any = net()
    wrapped: Any = net()
    wrapped[2] = checkpoint_wrapper(compiled(checkpoint_wrapper(wrapped[2])))
    wrapped = compiled(wrapped)
    assert names({"m": wrapped}) == names({"m": plain})
    assert not walk(wrapped, "m").loads_itself
    load({"m": plain}, save({"m": wrapped}))
    assert_same({"m": plain}, {"m": wrapped})
    load({"m": wrapped}, save({"m": net()}))


def test_a_module_called_module_keeps_its_name() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    assert names({"ema": averaged}) == ["ema/module.weight", "ema/module.bias", "ema/n_averaged"]
    averaged.update_parameters(nn.Linear(2, 2))
    other = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    load({"ema": other}, save({"ema": averaged}))
    assert_same({"ema": averaged}, {"ema": other})


def test_tied_weights() -> None:
    def tied() -> Any:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    one, other = tied(), tied()
    made = capture({"m": one}, rank=0)
    assert [(s.key.name, s.alias_of and s.alias_of.name) for s in made.tensors] == [
        ("m/embed.weight", None),
        ("m/head.weight", "m/embed.weight"),
    ]
    load({"m": other}, save({"m": one}))
    assert_same({"m": one}, {"m": other})
    assert other["head"].weight is other["embed"].weight


class Extra(nn.Linear):
    def __init__(self, extra: Any = None) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [{"a": 1, 2: (3,)}, {"t": torch.ones(3), "n": {"x": 1}}, torch.ones(2), [torch.ones(1)]]
)
def test_extra_state(extra: Any) -> None:
    source, target = nn.Sequential(Extra(extra)), nn.Sequential(Extra())
    assert any(name.startswith("m/0._extra_state") for name in names({"m": source}))
    load({"m": target}, save({"m": source}))
    assert_same({"m": source}, {"m": target})
    assert type(target[0].extra) is type(extra)


class Renaming(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: Any, keep_vars: Any) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "renamed"] = destination.pop(prefix + "weight")

    def _load_from_state_dict(self, state_dict: Any, prefix: Any, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "renamed")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_with_its_own_state_dict_has_its_way() -> None:
    def model() -> Any:
        return nn.DataParallel(nn.Sequential(nn.BatchNorm1d(2), checkpoint_wrapper(nn.Sequential(Renaming(2, 2)))))

    one, other = model(), model()
    for parameter in one.parameters():
        nn.init.normal_(parameter)
    assert "m/1.0.renamed" in names({"m": one}) and "m/1.0.weight" not in names({"m": one})
    assert [s.policy for s in capture({"m": one}, rank=0).tensors if s.key.name == "m/0.running_var"] == ["buffer"]
    load({"m": other}, save({"m": one}))
    assert_same({"m": one}, {"m": other})
    with pytest.raises(StateMismatch, match=r"m/1.0.renamed: shape \(3, 3\) in the checkpoint, \(2, 2\) in the state"):
        load({"m": other}, save({"m": nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(Renaming(3, 3)))}))


def test_hooks_are_respected() -> None:
    seen: list[str] = []
    model: Any = nn.Linear(2, 2)
    model.register_state_dict_pre_hook(lambda *args: seen.append("pre"))
    capture({"m": model}, rank=0)
    assert seen == ["pre"]
    model.register_load_state_dict_post_hook(lambda *args: seen.append("loaded"))
    load({"m": model}, save({"m": nn.Linear(2, 2)}))
    assert seen[-1] == "loaded"
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update({"more": torch.ones(1)}))
    assert "m/more" in names({"m": model})


def test_torch_s_own_modules() -> None:
    def model() -> Any:
        return nn.ModuleDict(
            {
                "weight_norm": parametrizations.weight_norm(nn.Linear(2, 2)),
                "spectral": spectral_norm(nn.Linear(2, 2)),
                "instance": nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
                "attention": nn.TransformerEncoderLayer(4, 2),
                "lstm": nn.LSTM(2, 2),
            }
        )

    one, other = model(), model()
    load({"m": other}, save({"m": one}))
    assert_same({"m": one}, {"m": other})
    assert set(names({"m": one})) == {f"m/{key}" for key in one.state_dict()}


def test_buffers_that_are_not_persistent_and_parameters_that_are_none_are_left_out() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("scratch", torch.ones(1), persistent=False)
    model.register_buffer("nothing", None)
    assert names({"m": model}) == ["m/weight"]


def test_lazy_modules_need_a_forward() -> None:
    with pytest.raises(UnsupportedValue, match="m/weight: a lazy parameter"):
        capture({"m": nn.LazyLinear(2)}, rank=0)
    lazy = nn.LazyLinear(2)
    lazy(torch.ones(1, 3))
    load({"m": lazy}, save({"m": nn.Linear(3, 2)}))


def test_patterns_reach_into_modules() -> None:
    made = capture({"m": net()}, rank=2, per_rank=["m/1.running_*"], rank0=["m/1.num*"])
    marks = {s.key.name: (s.key.rank, s.policy) for s in made.tensors}
    assert marks["m/1.running_var"] == (2, "replica") and marks["m/1.num_batches_tracked"] == (-1, "rank0")
    assert marks["m/1.weight"] == (-1, "replica")


def test_two_leaves_of_one_name_are_refused() -> None:
    inner = nn.Linear(1, 1)
    wrapper = nn.DataParallel(inner)
    wrapper.register_parameter("weight", nn.Parameter(torch.ones(1)))
    with pytest.raises(UnsupportedValue, match="m/weight: two leaves"):
        capture({"m": wrapper}, rank=0)
