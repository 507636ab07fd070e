"""Tensors of all kinds <-> boxes of plain strided memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ckptstore.errors import UnsupportedValue
from ckptstore.format.model import ITEMSIZE, SHARED, Box, SliceKey, whole
from ckptstore.state.boxes import is_dtensor, local_part
from ckptstore.state.markers import Sharded

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, n): n for n in ITEMSIZE if hasattr(torch, n)}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
Part = tuple[Box, torch.Tensor]  #: a box of the whole tensor, and a view of this rank's memory that holds exactly it


def is_tensor(obj: object) -> bool:
    """Whether it is saved as tensor data, and filled in place."""
    return isinstance(obj, torch.Tensor | np.ndarray | Sharded)


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """The name of the dtype of a plain strided tensor; UnsupportedValue for any other kind of tensor."""
    known = DTYPE_NAMES.get(tensor.dtype)
    if (
        type(tensor) not in _PLAIN_TYPES
        or known is None
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_nested
    ):
        raise UnsupportedValue(f"{name}: {_why_not(tensor)}")
    return known


def _why_not(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter without a shape; run one forward first"
    if tensor.is_meta:
        return "a tensor on the meta device has no content; give it memory with to_empty() first"
    if tensor.is_nested:
        return "a nested tensor cannot be saved; save its values() and offsets() instead"
    if tensor.layout is not torch.strided:
        return f"a tensor with the layout {tensor.layout} cannot be saved; save its parts or to_dense() instead"
    if type(tensor) not in _PLAIN_TYPES:
        return f"the tensor subclass {type(tensor).__qualname__} cannot be saved; save the plain tensors it is made of"
    return f"a tensor of dtype {tensor.dtype} cannot be saved; save it as {', '.join(('int8', 'float32'))} or the like"


def split(obj: Any, name: str, owner: int) -> tuple[str, tuple[int, ...], list[Part]]:
    """dtype and shape of the whole, and this rank's parts of it: views of its memory, detached.

    Parts are as few as boxes allow: none where an uneven split left this rank nothing. What has no element at all is
    one part, empty. For one rank's own (`owner` not SHARED), the local part is the whole.
    """
    if type(obj) is Sharded:
        return _split_sharded(obj, name, owner)
    if is_dtensor(obj):
        return _split_dtensor(obj, name, owner)
    tensor = numpy_as_tensor(obj, name)[0] if isinstance(obj, np.ndarray) else obj
    dtype, shape = dtype_name(tensor, name), tuple(tensor.shape)
    return dtype, shape, [(whole(shape), tensor.detach())]


def _split_sharded(obj: Sharded, name: str, owner: int) -> tuple[str, tuple[int, ...], list[Part]]:
    dtype, local, shape = dtype_name(obj.tensor, name), obj.tensor.detach(), tuple(obj.tensor.shape)
    if owner != SHARED:
        return dtype, shape, [(whole(shape), local)]
    if 0 in obj.global_shape:
        return dtype, obj.global_shape, [(whole(obj.global_shape), local.new_empty(obj.global_shape))]
    return dtype, obj.global_shape, [(Box(obj.offset, shape), local)] if local.numel() else []


def _split_dtensor(obj: Any, name: str, owner: int) -> tuple[str, tuple[int, ...], list[Part]]:
    local, made = local_part(obj, name)
    dtype = dtype_name(local, name)
    local = local.detach()
    if owner != SHARED:
        shape = tuple(local.shape)
        return dtype, shape, [(whole(shape), local)] if made else []
    shape = tuple(obj.shape)
    if made is None:
        return dtype, shape, []
    if 0 in shape:
        return dtype, shape, [(whole(shape), local.new_empty(shape))]
    if len(made.boxes) == 1:
        return dtype, shape, [(made.boxes[0][0], local)]
    return dtype, shape, [(box, _view(local, inside)) for box, inside in made.boxes]


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@lru_cache(maxsize=1 << 17)
def whole_key(name: str, owner: int, dtype: str, shape: tuple[int, ...]) -> SliceKey:
    """The key of all of a tensor; cached, since making 10,000 of them takes longer than the rest of a save."""
    return SliceKey(name, owner, dtype, tuple(shape), whole(tuple(shape)))


@lru_cache(maxsize=1 << 17)
def part_key(name: str, owner: int, dtype: str, shape: tuple[int, ...], box: Box) -> SliceKey:
    return SliceKey(name, owner, dtype, shape, box)


def numpy_as_tensor(array: np.ndarray[Any, Any], name: str) -> tuple[torch.Tensor, bool]:
    """A tensor of the array's content, and whether it is the array's own memory.

    Raises UnsupportedValue for subclasses that mean more than their elements, and for dtypes torch does not have.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedValue(f"{name}: {type(array).__qualname__} cannot be saved; save numpy.asarray of it")
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise UnsupportedValue(
            f"{name}: an array of dtype {array.dtype} cannot be saved; "
            "convert it to a bool, integer, float or complex dtype in this machine's byte order"
        )
    plain = array.view(np.ndarray)
    viewable = plain.flags.writeable and all(s >= 0 and s % plain.itemsize == 0 for s in plain.strides)
    return torch.from_numpy(plain if viewable else plain.copy(order="C")), viewable


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its lazy conjugation and negation carried out."""
    if tensor.is_neg() or tensor.is_conj():
        return tensor.resolve_conj().resolve_neg()
    return tensor
