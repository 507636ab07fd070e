"""What a checkpoint holds, and what a load asks of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ckptstore.format.model import SliceKey


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, as it is saved."""

    dtype: str
    shape: tuple[int, ...]
    numpy: bool = False
    sharded: bool = False  #: spread over ranks, in boxes smaller than the whole


class Catalog(Protocol):
    """The names that a checkpoint has. `rank` is the owner of a PerRank leaf, else SHARED."""

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""

    def names(self, prefix: str) -> Iterable[str]:
        """All names equal to `prefix` or below `prefix` + "/", of any rank; asked for each leaf, so quick."""

    def tensor(self, name: str, rank: int) -> TensorInfo | None: ...
    def has_value(self, name: str, rank: int) -> bool: ...


@dataclass(slots=True)
class Target:
    """Memory to fill with the bytes of `key`; `tensor` has key.box's shape, may be strided and on any device.

    `key.dtype` is the checkpoint's; the tensor's differs only where a cast was asked for.
    """

    key: SliceKey
    tensor: torch.Tensor
