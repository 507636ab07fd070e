"""The user's nested state -> named tensor slices and plain values; nothing is copied or changed."""

from __future__ import annotations

import fnmatch
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ckptstore.errors import UnsupportedValue
from ckptstore.format.model import SHARED, SliceKey
from ckptstore.state.boxes import describe_mesh, describe_placements, is_dtensor
from ckptstore.state.markers import PerRank, Rank0
from ckptstore.state.modules import strip
from ckptstore.state.names import escape, join
from ckptstore.state.tensors import dtype_name, is_tensor, part_key, resolved, split, whole_key
from ckptstore.state.values import MAX_DEPTH, encode
from ckptstore.state.walk import NOT_OPTIONS, Kind, Parameters, check_root, children, is_stateful, is_tree, kind_of

REPLICA = "replica"  #: ranks with the same key must have equal content
RANK0 = "rank0"  #: the content of the lowest rank that has the key counts
BUFFER = "buffer"  #: a persistent buffer of a module: like rank0, with a warning when ranks differ


@dataclass(slots=True)
class TensorSlice:
    """A box of a tensor that this rank has. `tensor` is detached, and may be strided and on any device."""

    key: SliceKey
    tensor: torch.Tensor
    policy: str
    numpy: bool = False
    alias_of: SliceKey | None = None  #: an earlier slice of this capture that is the same memory


@dataclass(slots=True)
class ValueSlice:
    """A plain value, encoded (see `values`); the options of one parameter group are one bytes object for all."""

    name: str
    rank: int
    data: bytes
    policy: str


@dataclass(slots=True)
class Captured:
    """Everything a rank has to save. `layouts` is JSON: device meshes, and for each DTensor which one and how."""

    tensors: list[TensorSlice]
    values: list[ValueSlice]
    layouts: dict[str, Any]


def capture(
    state: Mapping[str, object], *, rank: int, per_rank: Sequence[str] = (), rank0: Sequence[str] = ()
) -> Captured:
    """What `state` holds on this rank. `per_rank` and `rank0` are fnmatch patterns of full names.

    Raises UnsupportedValue, naming the path, for what is neither tensor nor plain data.
    """
    check_root(state)
    with no_garbage_collection():
        made = _Capture(state, rank, _pattern(per_rank), _pattern(rank0))
        for key, item in state.items():
            made.node(item, join("", key), _Context(), 1)
        for optimizer, path, context in made.optimizers:  # last, when all parameters have names
            made.optimizer(optimizer, path, context)
    return Captured(made.tensors, made.values, {"meshes": made.meshes, "tensors": made.layouts})


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    # Thousands of new objects set off full collections, which take 200 ms with torch loaded, and find nothing.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _pattern(patterns: Sequence[str]) -> re.Pattern[str] | None:
    if isinstance(patterns, str):
        raise UnsupportedValue(f"per_rank and rank0 are lists of patterns; write [{patterns!r}]")
    return re.compile("|".join(map(fnmatch.translate, patterns))) if patterns else None


@dataclass(frozen=True, slots=True)
class _Context:
    """What the markers around a leaf say about it."""

    owner: int = SHARED
    policy: str = REPLICA


class _Capture:
    def __init__(
        self,
        state: Mapping[str, object],
        rank: int,
        per_rank: re.Pattern[str] | None,
        rank0: re.Pattern[str] | None,
    ) -> None:
        self.rank = rank
        self.per_rank = per_rank
        self.rank0 = rank0
        self.tensors: list[TensorSlice] = []
        self.values: list[ValueSlice] = []
        self.meshes: list[dict[str, Any]] = []
        self.layouts: dict[str, Any] = {}
        self.optimizers: list[tuple[torch.optim.Optimizer, str, _Context]] = []
        self.parameters = Parameters(state)
        self._names: set[str] = set()
        self._mesh_index: dict[int, int] = {}  # by id
        self._first: dict[int, TensorSlice] = {}  # by address
        self._others: dict[Any, TensorSlice] = {}  # by address and more, where views of one address differ

    def node(self, obj: Any, path: str, context: _Context, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise UnsupportedValue(f"{path}: nested more than {MAX_DEPTH} deep, or a container that contains itself")
        if isinstance(obj, PerRank):
            self.node(obj.value, path, _Context(self.rank, REPLICA), depth)
        elif isinstance(obj, Rank0):
            self.node(obj.value, path, _Context(context.owner, RANK0), depth)
        elif is_tensor(obj):
            self.parameters.loose.append((path, obj))
            self.tensor(obj, path, context)
        elif isinstance(obj, nn.Module):
            self.module(obj, path, context, depth)
        elif isinstance(obj, torch.optim.Optimizer):
            self.optimizers.append((obj, path, context))
        elif is_stateful(obj):
            self.node(obj.state_dict(), path, context, depth + 1)
        else:
            kind = kind_of(obj)
            if kind is Kind.OBJECTS or (kind is Kind.TENSORS and is_tree(obj)):
                for key, item in children(obj, path):
                    self.node(item, join(path, key), context, depth + 1)
            else:
                self.leaf(obj, path, context)

    def leaf(self, obj: object, path: str, context: _Context) -> None:
        """A value, whose encoding refers to the tensors in it."""

        def on_tensor(rel: str, tensor: object) -> None:
            self.tensor(tensor, f"{path}/{rel}", context)

        self.value(encode(obj, path, on_tensor), path, context)

    def module(self, module: nn.Module, path: str, context: _Context, depth: int) -> None:
        made = self.parameters.walks[path]
        buffers = _Context(context.owner, BUFFER) if context == _Context() else context
        if made.saves_itself:
            are_buffers = {name for name, _ in made.buffers}
            for key, item in module.state_dict().items():
                name = strip(module, key)
                self.node(item, join(path, name), buffers if name in are_buffers else context, depth + 1)
            return
        for name, param in made.params:
            self.tensor(param, f"{path}/{escape(name)}", context)
        for name, buffer in made.buffers:
            self.tensor(buffer, f"{path}/{escape(name)}", buffers)
        for name, owner in made.extras:
            self.node(owner.get_extra_state(), join(path, name), context, depth + 1)

    def optimizer(self, optimizer: torch.optim.Optimizer, path: str, context: _Context) -> None:
        for group, members in self.parameters.of_optimizer(optimizer, path):
            found: list[tuple[str, object]] = []
            options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
            data = encode(options, f"{path}/group", lambda rel, tensor, found=found: found.append((rel, tensor)))  # type: ignore[misc]
            for name, param in members:
                of_group, of_state = join(f"{path}/group", name), join(f"{path}/state", name)
                self.value(data, of_group, context)
                for rel, tensor in found:
                    self.tensor(tensor, f"{of_group}/{rel}", context)
                entries = optimizer.state.get(param, {})  # not by index, which would make an entry
                if not is_tree(entries):
                    raise UnsupportedValue(f"{of_state}: an entry of an optimizer's state is a dict with keys of str")
                for key, item in entries.items():
                    if isinstance(item, torch.Tensor):
                        self.tensor(item, f"{of_state}/{escape(key)}", context)
                    else:
                        self.node(item, f"{of_state}/{escape(key)}", context, 1)

    def value(self, data: bytes, name: str, context: _Context) -> None:
        owner, policy = self._marked(name, context)
        self._claim(name)
        self.values.append(ValueSlice(name, owner, data, policy))

    def tensor(self, obj: Any, name: str, context: _Context) -> None:
        owner, policy = self._marked(name, context)
        self._claim(name)
        if type(obj) in (torch.nn.Parameter, torch.Tensor):
            self._add(whole_key(name, owner, dtype_name(obj, name), obj.shape), obj.detach(), policy, False)
            return
        dtype, shape, parts = split(obj, name, owner)
        if owner == SHARED and is_dtensor(obj):
            self._lay_out(obj, name)
        for box, tensor in parts:
            self._add(part_key(name, owner, dtype, shape, box), tensor, policy, isinstance(obj, np.ndarray))

    def _add(self, key: SliceKey, tensor: torch.Tensor, policy: str, is_numpy: bool) -> None:
        if tensor.is_neg() or tensor.is_conj():
            tensor = resolved(tensor)
        made = TensorSlice(key, tensor, policy, is_numpy)
        self.tensors.append(made)
        address = tensor.data_ptr()
        if address:  # the empty have none
            first = self._first.setdefault(address, made)
            if first is not made:
                first = first if _same(first.tensor, tensor) else self._others.setdefault(_identity(tensor), made)
                made.alias_of = first.key if first is not made else None

    def _marked(self, name: str, context: _Context) -> tuple[int, str]:
        if self.per_rank is not None and self.per_rank.match(name):
            return self.rank, REPLICA
        if self.rank0 is not None and self.rank0.match(name):
            return context.owner, RANK0
        return context.owner, context.policy

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise UnsupportedValue(f"{name}: two leaves of the state have this name; rename one")
        self._names.add(name)

    def _lay_out(self, tensor: Any, name: str) -> None:
        spec = tensor._spec
        index = self._mesh_index.get(id(spec.mesh))  # hashing a mesh takes longer
        if index is None:
            described = describe_mesh(spec.mesh)
            if described not in self.meshes:
                self.meshes.append(described)
            index = self._mesh_index[id(spec.mesh)] = self.meshes.index(described)
        self.layouts[name] = [index, describe_placements(spec.placements)]


def _identity(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(_identity(one) == _identity(other))
