"""What a module's state_dict would hold, without the cost of calling it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ckptstore.errors import UnsupportedValue

_WRAPPERS = {  # class -> the attribute in which it keeps the module that it wraps
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
}
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
#: Where hooks come from whose work is done here (wrapper names, resharding) or which only serve old checkpoints.
_KNOWN_HOOKS = (
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.fsdp._fully_shard.",
    "torch.nn.utils.parametrizations",
    "torch.nn.modules.",
)
EXTRA = "_extra_state"


@dataclass(slots=True)
class Walk:
    """A module's leaves under names without wrappers."""

    params: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    buffers: list[tuple[str, torch.Tensor]] = field(default_factory=list)  #: the persistent ones
    extras: list[tuple[str, nn.Module]] = field(default_factory=list)  #: modules with extra state, by its name
    saves_itself: bool = False  #: some part of it has its own idea of a state_dict
    loads_itself: bool = False  #: or of loading one


@dataclass(frozen=True, slots=True)
class _Traits:
    wraps: str | None
    saves: bool
    loads: bool
    extra: bool
    fsdp1: bool


def walk(module: nn.Module, path: str) -> Walk:
    """The leaves of `module`, which lies at `path` of the state, after its state_dict pre-hooks have run.

    FSDP2 reshards in such a hook. Raises UnsupportedValue for FSDP1.
    """
    made = Walk()
    _walk(module, "", made, path)
    return made


def _walk(module: nn.Module, prefix: str, made: Walk, path: str) -> None:
    traits = _traits_of(module)
    if traits.fsdp1:
        raise UnsupportedValue(f"{path}: FullyShardedDataParallel flattens its parameters; use fully_shard (FSDP2)")
    for hook in module._state_dict_pre_hooks.values():
        hook(module, prefix, False)
    own, hooks = module.__dict__, module._state_dict_hooks
    if traits.saves or "state_dict" in own or (hooks and _foreign(hooks)):
        made.saves_itself = True
    before, after = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    if traits.loads or "load_state_dict" in own or (before and _foreign(before)) or (after and _foreign(after)):
        made.loads_itself = True
    for name, param in module._parameters.items():
        if param is not None:
            made.params.append((prefix + name, param))
    transient = module._non_persistent_buffers_set
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in transient:
            made.buffers.append((prefix + name, buffer))
    if traits.extra:
        made.extras.append((prefix + EXTRA, module))
    for name, child in module._modules.items():
        if child is not None:
            _walk(child, prefix if name == traits.wraps else f"{prefix}{name}.", made, path)


def _traits_of(module: nn.Module) -> _Traits:
    kind: Any = type(module)
    return _traits(kind)


@lru_cache(maxsize=4096)
def _traits(kind: Any) -> _Traits:
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    return _Traits(
        wraps=next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None),
        saves=_overrides(kind, "state_dict") or _overrides(kind, "_save_to_state_dict"),
        loads=_overrides(kind, "load_state_dict") or _overrides(kind, "_load_from_state_dict"),
        extra=kind.get_extra_state is not nn.Module.get_extra_state,
        fsdp1=_FSDP1 in names,
    )


def _overrides(kind: type[nn.Module], method: str) -> bool:
    # Those of torch's own modules (batch norm) only convert checkpoints of old versions.
    return not str(getattr(kind, method).__module__).startswith("torch.nn.modules.")


def _foreign(hooks: dict[int, Any]) -> bool:
    return any(not _module_of(hook).startswith(_KNOWN_HOOKS) for hook in hooks.values())


def _module_of(hook: Any) -> str:
    inner = getattr(hook, "hook", hook)  # torch keeps load pre-hooks in an object of its own
    return str(getattr(inner, "__module__", ""))


def strip(module: nn.Module, key: str) -> str:
    """A key of `module.state_dict()` without the names of wrappers."""
    kept = []
    at: nn.Module | None = module
    for part in key.split("."):
        at = next((m for m in _layers(at) if part in m._modules or part in m._parameters or part in m._buffers), None)
        if at is None or part != _traits_of(at).wraps:
            kept.append(part)
        at = at._modules.get(part) if at is not None else None
    return ".".join(kept)


def _layers(module: nn.Module | None) -> Iterator[nn.Module]:
    """The module, and what it wraps: a wrapper's own hook may have left its name out of the key already."""
    while module is not None:
        yield module
        wraps = _traits_of(module).wraps
        module = module._modules.get(wraps) if wraps else None
