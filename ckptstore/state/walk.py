"""The shape of a user's state: which parts are plain, and what each parameter is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import nn

from ckptstore.errors import UnsupportedValue
from ckptstore.state.boxes import is_dtensor
from ckptstore.state.markers import PerRank, Rank0
from ckptstore.state.modules import Walk, walk
from ckptstore.state.names import join, unescape
from ckptstore.state.tensors import is_tensor
from ckptstore.state.values import MAX_DEPTH

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
#: Of an optimizer's group, what is not an option: names of parameters are in the names of our leaves.
NOT_OPTIONS = frozenset(("params", "param_names"))
_REFUSED_OPTIMIZERS = ("torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",)


class Kind(IntEnum):
    """What a container holds, the most demanding thing first found."""

    PLAIN = 0
    TENSORS = 1
    OBJECTS = 2  #: modules, optimizers, stateful objects, markers


@runtime_checkable
class Stateful(Protocol):
    """What has its own idea of its state, like torch's protocol of this name."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def is_stateful(obj: object) -> TypeGuard[Stateful]:
    return isinstance(obj, Stateful) and not isinstance(obj, type)


def kind_of(obj: object, parents: tuple[int, ...] = ()) -> Kind:
    """What `obj` holds at any depth. What cannot be saved counts as plain: its encoder refuses it by path."""
    if type(obj) in _ATOMS:
        return Kind.PLAIN
    if is_tensor(obj):
        return Kind.TENSORS
    if isinstance(obj, Mapping | list | tuple):
        if id(obj) in parents or len(parents) > MAX_DEPTH:
            return Kind.PLAIN
        parents += (id(obj),)
        most = Kind.PLAIN
        for item in obj.values() if isinstance(obj, Mapping) else obj:
            if type(item) not in _ATOMS:
                most = max(most, kind_of(item, parents))
                if most is Kind.OBJECTS:
                    break
        return most
    if isinstance(obj, np.generic) or not (isinstance(obj, nn.Module | PerRank | Rank0) or is_stateful(obj)):
        return Kind.PLAIN
    return Kind.OBJECTS


def is_tree(obj: object) -> TypeGuard[Mapping[str, object]]:
    """Whether it is flattened into its parts, rather than being one leaf, when it holds more than plain values."""
    return isinstance(obj, Mapping) and all(isinstance(key, str) for key in obj)


def children(obj: Any, path: str) -> Iterator[tuple[Any, object]]:
    """Keys (or indices) and parts of a container that holds objects, or of a mapping with keys of str."""
    if isinstance(obj, Mapping) and not is_tree(obj):
        odd = next(key for key in obj if not isinstance(key, str))
        raise UnsupportedValue(f"{path}: key {odd!r} is not a str, as those of a dict of modules and the like must be")
    yield from obj.items() if isinstance(obj, Mapping) else enumerate(obj)


def check_root(state: object) -> None:
    """Raises UnsupportedValue unless `state` is a mapping with non-empty keys of str."""
    if not is_tree(state):
        raise UnsupportedValue("a state is a mapping whose keys are str, like {'model': model}")
    if "" in state:
        raise UnsupportedValue("the state has an empty key; name what it holds")


class Parameters:
    """What the parameters of the state's modules are called, so that optimizers can name their state by them."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self.walks: dict[str, Walk] = {}  #: path -> leaves of the module there
        self.loose: list[tuple[str, Any]] = []  #: names of tensors that are elsewhere; the caller adds to it
        self._names: dict[int, str] | None = None  # by id
        self._loose_names: dict[Any, str] | None = None
        self._find(state, "", ())

    def _find(self, obj: Any, path: str, parents: tuple[int, ...]) -> None:
        if isinstance(obj, PerRank | Rank0):
            self._find(obj.value, path, parents)
        elif isinstance(obj, nn.Module):
            self.walks[path] = walk(obj, path)
        elif isinstance(obj, Mapping | list | tuple) and id(obj) not in parents and len(parents) <= MAX_DEPTH:
            for key, item in obj.items() if isinstance(obj, Mapping) else enumerate(obj):
                if type(item) not in _ATOMS:
                    self._find(item, join(path, key), (*parents, id(obj)))

    def name(self, param: torch.Tensor) -> str | None:
        """The qualified name of a parameter; None if it is nowhere in the state."""
        if self._names is None:
            self._names = {}
            for path, module in self.walks.items():
                prefix = qualified(path)
                for fqn, tensor in module.params:
                    self._names.setdefault(id(tensor), f"{prefix}.{fqn}")
        found = self._names.get(id(param))
        return self._by_memory(param) if found is None else found

    def _by_memory(self, param: torch.Tensor) -> str | None:
        # What is no module gives out detached tensors, which share memory with the parameter but are not it.
        if self._loose_names is None:
            self._loose_names = {}
            for name, tensor in self.loose:
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    self._loose_names.setdefault(_memory(tensor), qualified(name))
        return self._loose_names.get(_memory(param))

    def of_optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> Iterable[tuple[dict[str, Any], list[Any]]]:
        """Each group of `optimizer` with (qualified name, parameter) of its members.

        Raises UnsupportedValue for a parameter without a name, for state that belongs to no parameter, and for
        optimizers that keep their state elsewhere.
        """
        kinds = [f"{base.__module__}.{base.__qualname__}" for base in type(optimizer).__mro__]
        if any(kind in _REFUSED_OPTIMIZERS for kind in kinds):
            raise UnsupportedValue(f"{path}: {type(optimizer).__qualname__} hides its state; use fully_shard (FSDP2)")
        groups = []
        with_state = 0
        for index, group in enumerate(optimizer.param_groups):
            members = []
            for position, param in enumerate(group["params"]):
                name = self.name(param)
                if name is None:
                    raise UnsupportedValue(
                        f"{path}: parameter {position} of group {index}, of shape {tuple(param.shape)}, is in no "
                        "module of the state; put the module that has it into the state too"
                    )
                members.append((name, param))
                with_state += param in optimizer.state
            groups.append((group, members))
        if with_state != len(optimizer.state):
            self._refuse_foreign_state(optimizer, path)
        return groups

    def _refuse_foreign_state(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for key in optimizer.state:
            if id(key) not in known:
                what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
                raise UnsupportedValue(
                    f"{path}/state: the entry of {what} is of no parameter of the optimizer; keep it elsewhere"
                )


def qualified(name: str) -> str:
    """A name, or the path of a module, as the first part of a parameter's qualified name."""
    return ".".join(map(unescape, name.split("/")))


def _memory(tensor: Any) -> Any:
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.data_ptr(), tuple(tensor.shape), tensor.dtype
