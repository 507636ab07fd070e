"""The leaves of a load: finding them in the checkpoint, and the memory that takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ckptstore.errors import CorruptCheckpoint, UnsupportedValue
from ckptstore.format.model import SHARED
from ckptstore.state.boxes import is_dtensor
from ckptstore.state.catalog import Catalog, Target, TensorInfo
from ckptstore.state.markers import Sharded
from ckptstore.state.names import unescape
from ckptstore.state.retype import retype
from ckptstore.state.tensors import DTYPES, Part, is_tensor, numpy_as_tensor, part_key, split
from ckptstore.state.values import decode, encode

Make = Callable[[], Any]  #: gives an object once all targets are filled and all values are there
Leaf = Callable[[str, Any], Make]  #: of a saved tensor's name and of its counterpart in the state, if any


class Reading:
    """What a load needs of `catalog`, and what does not fit; nothing of the state is changed by collecting it."""

    def __init__(self, catalog: Catalog, rank: int, strict: bool, cast: bool) -> None:
        self.catalog = catalog
        self.rank = rank
        self.strict = strict
        self.cast = cast
        self.targets: list[Target] = []
        self.values: list[tuple[str, int]] = []
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.used: set[str] = set()
        self.data: Mapping[tuple[str, int], bytes] = {}  #: the values, while they are applied
        self.checks: list[Callable[[], None]] = []  #: what must hold before they are
        self.finish: list[Callable[[], None]] = []  #: what is left to do then

    def find_tensor(self, name: str) -> tuple[int, TensorInfo] | None:
        for owner in (SHARED, self.rank):
            info = self.catalog.tensor(name, owner)
            if info is not None:
                return owner, info
        return None

    def find_value(self, name: str) -> int | None:
        return next((owner for owner in (SHARED, self.rank) if self.catalog.has_value(name, owner)), None)

    def below(self, path: str) -> Iterator[str]:
        """Names strictly below `path` that are there for this rank."""
        return (name for name in self.catalog.names(path) if name != path and self.is_there(name))

    def is_there(self, name: str) -> bool:
        return self.find_tensor(name) is not None or self.find_value(name) is not None

    def lacking(self, name: str) -> None:
        """Note that the checkpoint has no leaf `name` for this rank."""
        self.used.add(name)
        self.missing.append(name)
        new_rank = self.rank >= self.catalog.world_size and any(True for _ in self.catalog.names(name))  # of PerRank
        if self.is_there(name):
            kind = "a tensor" if self.find_tensor(name) is not None else "a plain value"
            self.problems.append(f"{name}: {kind} in the checkpoint, but not in the state")
        elif self.strict and not new_rank:
            self.problems.append(f"{name}: not in the checkpoint")

    def no_more_than(self, key: str) -> None:
        """Note what the checkpoint has below a key of the state that nothing asked for."""
        for name in self.catalog.names(key):
            if self.strict and name not in self.used and self.is_there(name):
                self.problems.append(f"{name}: in the checkpoint, but not in the state")

    def value(self, name: str, owner: int, like: object, leaf: Leaf) -> Make:
        """A plain value, of the types that `like` has; tensors in it are made by `leaf`."""
        self.used.add(name)
        self.values.append((name, owner))
        mine = tensors_in(like, name)
        found = {full[len(name) + 1 :]: full for full in self.below(name)}
        makes = {rel: leaf(full, mine.get(rel)) for rel, full in found.items()}

        def make() -> Any:
            try:
                made = decode(self.data[name, owner], lambda rel: makes[rel]())
            except CorruptCheckpoint as error:
                raise CorruptCheckpoint(f"{name}: {error}") from error
            return retype(made, like, name)

        return make

    def in_place(self, name: str, obj: Any) -> None:
        """Fill the memory of a tensor, array, DTensor or Sharded."""
        owner, info, parts = self.check(name, obj)
        if info is not None:
            for part in self._writable(obj, name, parts):
                self.target(name, owner, info, part)

    def check(self, name: str, obj: Any) -> tuple[int, TensorInfo | None, list[Part]]:
        """Note what keeps the saved tensor `name` from filling `obj`: then there is no TensorInfo."""
        self.used.add(name)
        found = self.find_tensor(name)
        if found is None:
            if not (is_dtensor(obj) and obj.device_mesh.get_coordinate() is None):  # this rank never had a part
                self.lacking(name)
            return SHARED, None, []
        owner, info = found
        dtype, shape, parts = split(obj, name, owner)
        if shape != info.shape:
            self.problems.append(f"{name}: shape {info.shape} in the checkpoint, {shape} in the state")
        elif not self._takes(dtype, info):
            remedy = "" if self.cast else "; cast=True converts"
            self.problems.append(f"{name}: dtype {info.dtype} in the checkpoint, {dtype} in the state{remedy}")
        else:
            return owner, info, parts
        return owner, None, []

    def _takes(self, dtype: str, info: TensorInfo) -> bool:
        loses = info.dtype.startswith("complex") and not dtype.startswith("complex")
        return dtype == info.dtype or (self.cast and not loses)

    def equals(self, name: str, obj: object, cast: bool = False) -> bool:
        """Whether `obj` is a tensor of the shape and dtype that was saved; with `cast`, that it may be cast to."""
        found = self.find_tensor(name)
        if found is None or not is_tensor(obj):
            return False
        owner, info = found
        dtype, shape, _ = split(obj, name, owner)
        return shape == info.shape and (dtype == info.dtype or (cast and self._takes(dtype, info)))

    def _writable(self, obj: Any, name: str, parts: list[Part]) -> Iterator[Part]:
        """The parts; where bytes cannot go there as they are, memory that is copied there at the end."""
        if isinstance(obj, np.ndarray):
            if not obj.flags.writeable:
                self.problems.append(f"{name}: the array in the state is read-only; give a copy of it")
            elif not numpy_as_tensor(obj, name)[1]:
                self.finish.append(lambda: np.copyto(obj, parts[0][1].numpy()))
            yield from parts
            return
        for box, tensor in parts:
            if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                self.problems.append(f"{name}: the tensor in the state is an expanded view; give a contiguous one")
            elif tensor.is_conj() or tensor.is_neg():
                plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self.finish.append(lambda tensor=tensor, plain=plain: _copy(tensor, plain))  # type: ignore[misc]
                yield box, plain
            else:
                yield box, tensor

    def target(self, name: str, owner: int, info: TensorInfo, part: Part) -> None:
        box, tensor = part
        if box.numel:
            self.targets.append(Target(part_key(name, owner, info.dtype, info.shape, box), tensor))

    def like_or_new(self, name: str, like: Any) -> Make:
        """The tensor `like`, filled in place, if it can take what was saved; else a new one."""
        if self.equals(name, like, cast=True):
            self.in_place(name, like)
            return lambda: like
        return self.new(name, like)

    def new(self, name: str, like: Any, device: torch.device | None = None) -> Make:
        """A new tensor of the saved dtype: placed as the DTensor `like` if the whole has its shape, else whole.

        On `device`, else where `like` is, else on the CPU. An array if an array was saved.
        """
        found = self.find_tensor(name)
        assert found is not None, name
        self.used.add(name)
        owner, info = found
        if isinstance(like, Sharded):
            like = like.tensor
        if info.numpy and not isinstance(like, torch.Tensor):
            return self._fresh(name, owner, info, torch.empty(info.shape, dtype=DTYPES[info.dtype])).numpy
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            raise UnsupportedValue(f"{name}: this torch has no dtype {info.dtype}; use a newer one")
        if is_dtensor(like) and info.shape == (tuple(like.shape) if owner == SHARED else split(like, name, owner)[1]):
            made = self._fresh(name, owner, info, _empty_like(like, dtype))
            return lambda: made
        if info.sharded and is_dtensor(like):
            self.problems.append(
                f"{name}: saved sharded, of shape {info.shape}, but what it belongs to has {tuple(like.shape)}, so its "
                "placement is unknown; take one step first, so that it is there to be filled"
            )
        if device is None and isinstance(like, torch.Tensor):
            device = like.device
        made = self._fresh(name, owner, info, torch.empty(info.shape, dtype=dtype, device=device))
        return lambda: made

    def _fresh(self, name: str, owner: int, info: TensorInfo, tensor: torch.Tensor) -> torch.Tensor:
        for part in split(tensor, name, owner)[2]:
            self.target(name, owner, info, part)
        return tensor

    def tree(self, path: str, like: Any, leaf: Leaf) -> Make:
        """What was saved under `path`, rebuilt: a value, a tensor (by `leaf`), or a dict of such.

        `like` is the state's counterpart, for types and the order of keys; the saved structure prevails.
        """
        names = [name for name in self.catalog.names(path) if self.is_there(name)]
        return self._subtree(path, _nested(path, names), like, leaf)

    def _subtree(self, path: str, node: dict[str, Any], like: Any, leaf: Leaf) -> Make:
        owner = self.find_value(path)
        if owner is not None:
            return self.value(path, owner, like, leaf)
        if self.find_tensor(path) is not None:
            return leaf(path, like)
        likes = like if isinstance(like, Mapping) else {}
        if isinstance(like, list | tuple):
            likes = {str(index): item for index, item in enumerate(like)}
        order = [key for key in likes if key in node] + [key for key in node if key not in likes]
        makes = {key: self._subtree(node[key][0], node[key][1], likes.get(key), leaf) for key in order}

        def make() -> Any:
            made = {key: one() for key, one in makes.items()}
            if isinstance(like, list | tuple) and list(made) == [str(index) for index in range(len(made))]:
                return retype(list(made.values()), like, path)
            return retype(made, like, path)

        return make


def _nested(path: str, names: list[str]) -> dict[str, Any]:
    """{component: (its name, {component: ...})} of the names below `path`."""
    root: dict[str, Any] = {}
    for name in names:
        at, full = root, path
        for part in name[len(path) + 1 :].split("/") if name != path else ():
            full = f"{full}/{part}"
            at = at.setdefault(unescape(part), (full, {}))[1]
    return root


def tensors_in(obj: object, path: str) -> dict[str, Any]:
    """The tensors of a list or dict that is one value, by relative name."""
    found: dict[str, Any] = {}
    if isinstance(obj, list | tuple | Mapping):
        encode(obj, path, found.__setitem__)
    return found


def _empty_like(like: Any, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_like(like.detach(), dtype=dtype)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        into.copy_(source)
