"""Loading an optimizer: state built with its parameters' placement, never by a step."""

from __future__ import annotations

from typing import Any

import torch

from ckptstore.errors import StateMismatch
from ckptstore.state.names import join, unescape
from ckptstore.state.reading import Make, Reading
from ckptstore.state.walk import NOT_OPTIONS, Parameters


def read_optimizer(reading: Reading, parameters: Parameters, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Ask for the options of all groups and for the state of all parameters of `optimizer`, which lies at `path`."""
    saved: dict[str, list[str]] = {}  # qualified name -> the keys that it has state for
    prefix = f"{path}/state/"
    for name in reading.below(f"{path}/state"):
        param, _, key = name[len(prefix) :].partition("/")
        keys = saved.setdefault(param, [])
        if (key := key.partition("/")[0]) not in keys:
            keys.append(key)
    for group, members in parameters.of_optimizer(optimizer, path):
        _read_options(reading, group, [join(f"{path}/group", name) for name, _ in members])
        for name, param in members:
            state = join(f"{path}/state", name)
            if reading.find_value(join(f"{path}/group", name)) is None:
                continue  # a parameter that the checkpoint does not know keeps its state
            own = optimizer.state.get(param, {})
            makes: dict[str, Make] = {}
            for key in saved.get(state[len(prefix) :], ()):
                existing = own.get(unescape(key))
                makes[unescape(key)] = reading.tree(f"{state}/{key}", existing, _placing(reading, param, key))
            reading.finish.append(_assigning(optimizer, group, param, makes))


def _placing(reading: Reading, param: torch.Tensor, key: str) -> Any:
    def leaf(name: str, existing: Any) -> Make:
        if reading.equals(name, existing):
            reading.in_place(name, existing)
            return lambda: existing
        if key == "step":  # as torch does: on the CPU, unless the group says otherwise
            return reading.new(name, None, torch.device("cpu"))
        return reading.new(name, param)

    return leaf


def _assigning(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor, makes: Any) -> Any:
    def assign() -> None:
        if not makes:
            optimizer.state.pop(param, None)
            return
        entries = {key: make() for key, make in makes.items()}
        step = entries.get("step")
        if isinstance(step, torch.Tensor) and (group.get("capturable") or group.get("fused")):
            entries["step"] = step.to(param.device)
        own = optimizer.state[param]
        own.clear()
        own.update(entries)

    return assign


def _read_options(reading: Reading, group: dict[str, Any], names: list[str]) -> None:
    """The options of a group are those of its parameters, which must have been in one group, or in groups alike."""
    found = [(name, reading.find_value(name)) for name in names]
    for name, owner in found:
        if owner is None:
            reading.lacking(name)
    known = [(name, owner) for name, owner in found if owner is not None]
    if not known:
        return
    first, *others = known
    options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
    make = reading.value(*first, options, reading.like_or_new)
    for other in others:
        reading.values.append(other)
        reading.used.update((other[0], *reading.below(other[0])))

    def check() -> None:
        for other in others:
            if reading.data[other] != reading.data[first]:
                raise StateMismatch(
                    f"{other[0]} and {first[0]} had different options when saved, but are in one group now; "
                    "group the optimizer's parameters as they were"
                )

    reading.checks.append(check)
    reading.finish.append(lambda: group.update(make()))
