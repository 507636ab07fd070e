"""Loading in place: what of a checkpoint the user's state takes, and where each byte goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ckptstore.errors import StateMismatch
from ckptstore.state.catalog import Catalog, Target
from ckptstore.state.markers import PerRank, Rank0
from ckptstore.state.modules import strip
from ckptstore.state.names import join
from ckptstore.state.optimizers import read_optimizer
from ckptstore.state.reading import Make, Reading, tensors_in
from ckptstore.state.tensors import is_tensor
from ckptstore.state.walk import Kind, Parameters, Stateful, check_root, children, is_stateful, is_tree, kind_of


class Restore:
    """A load that fits: fill `targets`, fetch `values` (name, rank), then call `apply`, once."""

    def __init__(self, reading: Reading, makes: dict[str, Make]) -> None:
        self.targets: list[Target] = reading.targets
        self.values: list[tuple[str, int]] = reading.values
        self.missing: list[str] = reading.missing
        self._reading = reading
        self._makes = makes

    def apply(self, values: Mapping[tuple[str, int], bytes]) -> dict[str, object]:
        """Give objects their state, when all targets are filled, and return the plain leaves of the state.

        Raises CorruptCheckpoint for a value that does not decode, and StateMismatch for one that the state's types
        refuse; the state is half changed then, as it is with targets filled in part.
        """
        self._reading.data = values
        for check in self._reading.checks:
            check()
        made = {key: make() for key, make in self._makes.items()}
        for finish in self._reading.finish:
            finish()
        return made


def template(
    state: Mapping[str, object], catalog: Catalog, *, rank: int, world_size: int, strict: bool, cast: bool
) -> Restore:
    """What `state` takes from a checkpoint. Changes nothing (but runs modules' state_dict pre-hooks, which reshard).

    Keys of the checkpoint that `state` has not are skipped. Raises one StateMismatch that lists all shapes and, unless
    `cast`, dtypes that differ; with `strict` also each name that only one side has. Raises UnsupportedValue as
    `capture` does.
    """
    check_root(state)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    made = _Template(state, Reading(catalog, rank, strict, cast))
    makes = made.children(state, "")
    for optimizer, path in made.optimizers:  # last, when all parameters have names
        read_optimizer(made.reading, made.parameters, optimizer, path)
    for key in state:
        made.reading.no_more_than(join("", key))
    problems = made.reading.problems
    if problems:
        raise StateMismatch(f"the checkpoint does not fit the state in {len(problems)} places:\n" + "\n".join(problems))
    return Restore(made.reading, makes)


class _Template:
    def __init__(self, state: Mapping[str, object], reading: Reading) -> None:
        self.reading = reading
        self.parameters = Parameters(state)
        self.optimizers: list[tuple[torch.optim.Optimizer, str]] = []

    def children(self, obj: Any, path: str) -> dict[Any, Make]:
        makes = {key: self.node(item, join(path, key)) for key, item in children(obj, path)}
        return {key: make for key, make in makes.items() if make is not None}

    def node(self, obj: Any, path: str) -> Make | None:
        """Ask for what `obj` needs; what is returned makes the plain leaves in it."""
        if isinstance(obj, PerRank | Rank0):
            return self.node(obj.value, path)
        if is_tensor(obj):
            self.parameters.loose.append((path, obj))
            self.reading.in_place(path, obj)
        elif isinstance(obj, nn.Module):
            self.module(obj, path)
        elif isinstance(obj, torch.optim.Optimizer):
            self.optimizers.append((obj, path))
        elif is_stateful(obj):
            self.stateful(obj, path)
        else:
            return self.container(obj, path)
        return None

    def container(self, obj: Any, path: str) -> Make | None:
        kind, owner = kind_of(obj), self.reading.find_value(path)
        if kind is Kind.PLAIN and owner is None and not (is_tree(obj) and any(self.reading.below(path))):
            self.reading.lacking(path)
            return None
        if kind is Kind.OBJECTS or (is_tree(obj) and (owner is None or kind is Kind.TENSORS)):
            makes = self.children(obj, path)
            if not makes:
                return None
            if isinstance(obj, Mapping):
                return lambda: {key: make() for key, make in makes.items()}
            return lambda: [makes[index]() if index in makes else None for index in range(len(obj))]
        if owner is None:
            self.reading.lacking(path)
            return None
        self.same_tensors(obj, path)
        return self.reading.value(path, owner, obj, self.reading.like_or_new)

    def same_tensors(self, obj: Any, path: str) -> None:
        """A list of tensors is filled in place, so the saved one must be like it."""
        saved = {name[len(path) + 1 :] for name in self.reading.below(path)}
        mine = tensors_in(obj, path)
        for rel in mine:
            if rel not in saved:
                self.reading.lacking(f"{path}/{rel}")
            else:
                self.reading.check(f"{path}/{rel}", mine[rel])
        if self.reading.strict:
            extra = sorted(saved - mine.keys())
            self.reading.problems += [f"{path}/{rel}: in the checkpoint, but not in the state" for rel in extra]

    def module(self, module: nn.Module, path: str) -> None:
        made = self.parameters.walks[path]
        if made.saves_itself or made.loads_itself:
            self.module_by_state_dict(module, path)
            return
        for name, tensor in (*made.params, *made.buffers):
            self.reading.in_place(join(path, name), tensor)
        for name, owner in made.extras:
            make = self.tree(join(path, name), owner.get_extra_state())
            if make is not None:
                self.reading.finish.append(lambda owner=owner, make=make: owner.set_extra_state(make()))  # type: ignore[misc]

    def module_by_state_dict(self, module: nn.Module, path: str) -> None:
        like = module.state_dict()
        makes: dict[str, Make] = {}
        for key, item in like.items():
            name = join(path, strip(module, key))
            make = self.tree(name, item)
            if make is not None:
                makes[key] = make
                if is_tensor(item):
                    self.reading.check(name, item)

        def load() -> None:
            made = OrderedDict((key, make()) for key, make in makes.items())
            made._metadata = getattr(like, "_metadata", {})  # type: ignore[attr-defined]  # versions of modules
            module.load_state_dict(made, strict=len(made) == len(like))  # what may be missing is judged already

        self.reading.finish.append(load)

    def stateful(self, obj: Stateful, path: str) -> None:
        like = obj.state_dict()
        self.loose(like, path)
        make = self.tree(path, like)
        if make is not None:
            self.reading.finish.append(lambda: obj.load_state_dict(make()))

    def loose(self, like: Any, path: str) -> None:
        """An optimizer's parameters may be those of a wrapper that is no module."""
        if is_tensor(like):
            self.parameters.loose.append((path, like))
        elif is_tree(like):
            for key, item in like.items():
                self.loose(item, join(path, key))

    def tree(self, path: str, like: Any) -> Make | None:
        if not any(self.reading.is_there(name) for name in self.reading.catalog.names(path)):
            self.reading.lacking(path)
            return None
        return self.reading.tree(path, _unmarked(like), self.reading.new)


def _unmarked(like: Any) -> Any:
    """A template without markers, as the objects that get it back gave it out."""
    if isinstance(like, PerRank | Rank0):
        return _unmarked(like.value)
    if kind_of(like) is Kind.OBJECTS:
        return {key: _unmarked(item) for key, item in children(like, "")}
    return like
