import collections
import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from ckptstore.errors import StateMismatch, UnsupportedValue
from ckptstore.format.model import ITEMSIZE, SHARED, Box
from ckptstore.state import PerRank, Rank0, Sharded, capture
from tests.state.memory_catalog import assert_same, bits, load, save


def random_tensor(dtype: Any, *shape: Any) -> Any:
    count = int(np.prod(shape)) * ITEMSIZE[dtype]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0,), (2, 0, 3)])
def test_every_dtype_round_trips(dtype: Any, shape: Any) -> None:
    source = random_tensor(dtype, *shape)
    target = torch.zeros_like(source.view(torch.uint8)).view(source.dtype) if source.dim() else source.clone()
    if not shape:
        target.copy_(random_tensor(dtype))
    assert load({"x": target}, save({"x": source})) == {}
    assert np.array_equal(bits(source), bits(target))


@pytest.mark.parametrize(
    "odd",
    [
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(4, 6)[1:3, ::2],
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, 3, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(5, requires_grad=True),
        lambda: torch.randn(5, requires_grad=True) * 2,
    ],
)
def test_odd_layouts_round_trip(odd: Any) -> None:
    source, target = odd(), odd()
    load({"x": target}, save({"x": source}))
    assert torch.equal(source, target)
    assert not capture({"x": source}, rank=0).tensors[0].tensor.requires_grad


def test_an_expanded_tensor_can_be_saved_but_not_filled() -> None:
    saved = save({"x": torch.ones(1).expand(3)})
    load({"x": torch.zeros(3)}, saved)
    with pytest.raises(StateMismatch, match="x: the tensor in the state is an expanded view"):
        load({"x": torch.ones(1).expand(3)}, saved)


def test_numpy_comes_back_in_place() -> None:
    def arrays(fill: Any) -> Any:
        base = np.full((4, 6), fill, np.float32)
        return {
            "plain": np.full((2, 3), fill, np.int16),
            "zero_d": np.array(fill, np.uint64),
            "reversed": base[::-1, ::2],
            "misaligned": np.full(3, fill, np.dtype([("a", "u1"), ("b", "<i4")]))["b"],
            "bool": np.array([bool(fill)]),
        }

    source, target = arrays(7), arrays(0)
    held = dict(target)
    assert load(target, save(source)) == {}
    for name, array in target.items():
        assert array is held[name] and np.array_equal(array, source[name])


def test_a_read_only_array_can_be_saved_but_not_filled() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    with pytest.raises(StateMismatch, match="x: the array in the state is read-only"):
        load({"x": array}, save({"x": array}))


def test_states_of_generators() -> None:
    def state() -> Any:
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}

    saved = save(state())
    expected = random.random(), np.random.rand(), torch.rand(1)
    target = state()
    values = load(target, saved)
    assert values.keys() == {"python", "numpy"}
    random.setstate(values["python"])
    np.random.set_state(values["numpy"])
    torch.set_rng_state(target["torch"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_plain_values_come_back_and_the_state_is_left_alone() -> None:
    state: Any = {
        "epoch": 3,
        "nested": {"a": [1, (2, None)], "b": {1: "x"}},
        "t": {"w": torch.ones(2), "lr": 0.1},
        "no": {},
    }
    saved = save(state)
    assert sorted(saved.values) == [("epoch", -1), ("nested", -1), ("no", -1), ("t/lr", -1)]
    given: Any = {"epoch": 0, "nested": {}, "t": {"w": torch.zeros(2), "lr": 0.0}, "no": {}}
    assert load(given, saved) == {"epoch": 3, "nested": state["nested"], "t": {"lr": 0.1}, "no": {}}
    assert given["epoch"] == 0 and given["t"]["lr"] == 0.0
    assert given["t"]["w"].tolist() == [1, 1]


def test_types_of_the_state_are_kept_where_it_has_them() -> None:
    point = collections.namedtuple("point", "x y")
    state: dict[str, Any] = {"p": point(1, 2), "d": collections.defaultdict(list, a=[1]), "s": torch.Size([2])}
    state["c"] = collections.Counter("aab")
    values = load(state, save(state))
    assert values == state and [type(values[k]) for k in state] == [type(state[k]) for k in state]
    assert values["d"].default_factory is list
    plain = load(dict.fromkeys(state), save(state))
    assert [type(plain[k]) for k in state] == [tuple, dict, tuple, collections.Counter]


def test_a_list_of_tensors_is_one_value_and_filled_in_place() -> None:
    source: Any = {"l": [torch.ones(2), {"n": 5, 3: torch.full((1,), 9.0)}], "i": {0: torch.ones(1)}}
    saved = save(source)
    assert sorted(name for name, _ in saved.infos) == ["i/0", "l/0", "l/1/3"]
    target: Any = {"l": [torch.zeros(2), {"n": 0, 3: torch.zeros(1)}], "i": {0: torch.zeros(1)}}
    values = load(target, saved)
    assert values["l"][0] is target["l"][0] and values["l"][1]["n"] == 5
    assert_same({"i": source["i"], "t": source["l"][0]}, {"i": target["i"], "t": target["l"][0]})
    with pytest.raises(StateMismatch, match="l/1: not in the checkpoint"):
        load({"l": [torch.zeros(2), torch.zeros(1)], "i": target["i"]}, saved)


def test_names_are_escaped() -> None:
    names = [s.key.name for s in capture({"a/b": {"c~d": torch.ones(1)}}, rank=0).tensors]
    assert names == ["a~1b/c~0d"]
    state = {"a/b": {"c~d": torch.ones(1), "e": 1}}
    target: Any = {"a/b": {"c~d": torch.zeros(1), "e": 0}}
    assert load(target, save(state)) == {"a/b": {"e": 1}}
    assert target["a/b"]["c~d"].item() == 1


def test_memory_with_two_names_is_told() -> None:
    base = torch.arange(6.0)
    made = capture({"a": base, "b": base.view(6), "c": base[:3], "d": base[:3], "e": base.clone()}, rank=0)
    assert [s.alias_of and s.alias_of.name for s in made.tensors] == [None, "a", None, "c", None]


def test_markers() -> None:
    state = {"p": PerRank({"t": torch.ones(2), "n": 1}), "r": Rank0([1]), "s": 2, "rt": Rank0(torch.ones(1))}
    made = capture(state, rank=3, per_rank=["s"], rank0=["p/*"])
    assert [(s.key.name, s.key.rank, s.policy) for s in made.tensors] == [("p/t", 3, "rank0"), ("rt", SHARED, "rank0")]
    assert [(v.name, v.rank, v.policy) for v in made.values] == [
        ("p/n", 3, "rank0"),
        ("r", SHARED, "rank0"),
        ("s", 3, "replica"),
    ]


def test_sharded() -> None:
    made = capture({"x": Sharded(torch.ones(2, 3), (4, 3), (2, 0)), "none": Sharded(torch.ones(0), (4,), (4,))}, rank=0)
    assert [(s.key.name, s.key.shape, s.key.box) for s in made.tensors] == [("x", (4, 3), Box((2, 0), (2, 3)))]
    empty = capture({"x": Sharded(torch.ones(0, 2), (0, 2), (0, 0))}, rank=0).tensors
    assert [s.key.box for s in empty] == [Box((0, 0), (0, 2))]
    with pytest.raises(ValueError, match="does not lie within"):
        Sharded(torch.ones(2), (4,), (3,))
    saved = save({"x": torch.arange(12.0).reshape(4, 3)})
    target = Sharded(torch.zeros(2, 3), (4, 3), (1, 0))
    load({"x": target}, saved)
    assert target.tensor.tolist() == [[3, 4, 5], [6, 7, 8]]


def subclass() -> Any:
    class Mine(torch.Tensor):
        pass

    return torch.ones(2).as_subclass(Mine)


def fake() -> Any:
    with FakeTensorMode():
        return torch.ones(2)


def cyclic() -> Any:
    made: dict[str, object] = {"t": torch.ones(1)}
    made["self"] = made
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "dtype torch.qint8"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (subclass, "subclass .*Mine"),
        (fake, "subclass FakeTensor|meta"),
        (lambda: nn.parameter.UninitializedParameter(), "lazy"),
        (lambda: np.array([object()]), "dtype object"),
        (lambda: np.array(["a"]), "dtype <U1"),
        (lambda: np.ones(2, ">f4"), "byte order"),
        (lambda: np.ma.masked_array([1]), "MaskedArray"),
        (lambda: {1}, "set"),
        (lambda: print, "builtin"),
        (lambda: object(), "object"),
        (lambda: int, "type"),
        (lambda: torch.float32, "dtype"),
        (lambda: torch.Generator(), "Generator"),
        (lambda: collections.deque(), "deque"),
        (cyclic, "contains itself"),
    ],
)
@pytest.mark.parametrize("inside", [lambda x: x, lambda x: [x]])
def test_refused_by_path(make: Any, why: Any, inside: Any) -> None:
    with pytest.raises(UnsupportedValue, match=f"^a/b.*({why})"):
        capture({"a": {"b": inside(make()), "t": torch.ones(1)}}, rank=0)


def test_a_state_is_a_mapping_of_str() -> None:
    bad: list[Any] = [[1], {1: 2}, {"": 1}]
    for state in bad:
        with pytest.raises(UnsupportedValue):
            capture(state, rank=0)
    with pytest.raises(UnsupportedValue, match="a: key 0 is not a str"):
        capture({"a": {0: nn.Linear(1, 1)}}, rank=0)
    with pytest.raises(UnsupportedValue, match="lists of patterns"):
        capture({"a": 1}, rank=0, per_rank="a")


def test_any_mapping_will_do() -> None:
    proxy = types.MappingProxyType
    state = proxy({"a": proxy({"b": 1}), "c": proxy({"t": torch.ones(1)})})
    assert load(state, save(state)) == {"a": {"b": 1}}
