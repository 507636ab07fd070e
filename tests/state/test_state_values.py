import contextlib
import math
import random
import struct
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CorruptCheckpoint, UnsupportedValue
from ckptstore.state.values import MAX_DEPTH, decode, encode

atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
)
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.none() | st.binary()
trees = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.dictionaries(st.text(), inner)
    ),
)


def same(one: Any, other: Any) -> Any:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and not isinstance(one, np.generic):
        return struct.pack("d", one) == struct.pack("d", other)
    return one == other


@given(trees)
def test_plain_data_round_trips_exactly(value: Any) -> None:
    data = encode(value, "x")
    assert same(decode(data), value)
    assert data.isascii() and encode(decode(data), "x") == data


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack("d", bytes.fromhex("010000000000f87f"))[0],
        5e-324,
        1 << 4095,
        "\ud800",
        "\ud800\udc00",
        {"\ud800": 1},
        {"~b": "not a tag"},
        {"~": 1, "a": 2},
        {1: "a", "1": "b", (1, 2): "c", None: "d", 1.5: "e", b"k": "f"},
        Counter({3: 2, 7: 1}),
        OrderedDict(b=1, a=2),
        np.float32(0.1),
        np.float64("nan").view(np.int64),
        np.complex64(1 + 2j),
        np.uint64(2**64 - 1),
        np.bool_(True),
        random.Random(3).getstate(),
    ],
)
def test_what_json_lacks_round_trips(value: Any) -> None:
    assert same(decode(encode(value, "x")), value)


def test_a_huge_int_round_trips() -> None:
    assert decode(encode([1 << 20000, -(1 << 20000)], "x")) == [1 << 20000, -(1 << 20000)]


def test_subclasses_become_their_base() -> None:
    point = namedtuple("point", "x y")
    assert same(decode(encode(torch.Size([2, 3]), "x")), (2, 3))
    assert same(decode(encode(point(1, 2), "x")), (1, 2))
    assert same(decode(encode(np.str_("a"), "x")), "a")


def test_the_order_of_a_dict_is_kept() -> None:
    assert encode({"b": 1, "a": 2}, "x") == b'{"b":1,"a":2}'


def test_references_are_relative() -> None:
    found: dict[str, Any] = {}
    data = encode({"a": [torch.ones(1)], 3: torch.zeros(1), "p/q": (torch.ones(2),)}, "x", found.__setitem__)
    assert list(found) == ["a/0", "3", "p~1q/0"]
    assert decode(data, found.__getitem__) == {"a": [found["a/0"]], 3: found["3"], "p/q": (found["p~1q/0"],)}


def loop() -> Any:
    made: list[Any] = []
    made.append([made])
    return made


def deep(depth: Any) -> Any:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({1, 2}, "x: builtins.set"),
        ({"a": [0, print]}, "x/a/1: builtins.builtin_function"),
        ({"a": {"b/c": object()}}, "x/a/b~1c: builtins.object"),
        ([1j], "x/0"),
        ([bytearray(b"a")], "x/0"),
        (np.longdouble(1), "x: numpy"),
        (loop(), "x/0/0: the container contains itself"),
        (deep(MAX_DEPTH), "nested more than"),
        ({frozenset((1,)): 1}, "a key of x: builtins.frozenset"),
        ([torch.ones(1)], "x/0: a tensor"),
    ],
)
def test_the_rest_is_refused_by_path(value: Any, where: Any) -> None:
    with pytest.raises(UnsupportedValue, match=where.replace("(", "\\(")):
        encode(value, "x")


def test_the_deepest_that_is_written_is_read() -> None:
    assert same(decode(encode(deep(MAX_DEPTH - 1), "x")), deep(MAX_DEPTH - 1))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"NaN",
        b"[1,Infinity]",
        b'{"a":1,"a":2}',
        b'{"~x":1}',
        b'{"~b":"?"}',
        b'{"~b":1}',
        b'{"~f":"00"}',
        b'{"~f":7}',
        b'{"~i":"zz"}',
        b'{"~i":5}',
        b'{"~t":5}',
        b'{"~t":"ab"}',
        b'{"~d":[[1]]}',
        b'{"~d":[[1,2],[1,3]]}',
        b'{"~d":[[[],2]]}',
        b'{"~d":7}',
        b'{"~n":["object","AA=="]}',
        b'{"~n":["int64","AA=="]}',
        b'{"~n":[[],"AA=="]}',
        b'{"~r":"a"}',
        b'{"~b":"","a":1}',
        b"1" * 5000,
        b"[" * 200 + b"]" * 200,
        b"[" * 500_000,
        b'{"~t":' * 500_000,
    ],
)
def test_bad_encodings_are_refused(data: Any) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode(data)


@given(st.binary(max_size=60) | st.text('[]{}":,~tdnfr01ab', max_size=40).map(str.encode))
def test_no_input_raises_anything_else(data: Any) -> None:
    with contextlib.suppress(CorruptCheckpoint):
        decode(data)


def test_a_reference_to_nothing_is_corrupt() -> None:
    with pytest.raises(CorruptCheckpoint):
        decode(b'{"~r":"a"}', dict[str, object]().__getitem__)
