"""What a user wraps values in, to say how ranks share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sharded:
    """This rank's box of a tensor that is spread over ranks by hand.

    ``tensor`` holds the box that starts at ``offset`` (elements, one per dimension) of a tensor of ``global_shape``.
    Loading fills ``tensor`` in place. Raises ValueError if the box leaves the tensor.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise TypeError(f"Sharded holds a torch tensor, not {type(self.tensor).__qualname__}; use torch.from_numpy")
        object.__setattr__(self, "global_shape", tuple(map(int, self.global_shape)))
        object.__setattr__(self, "offset", tuple(map(int, self.offset)))
        shape = tuple(self.tensor.shape)
        fits = len(shape) == len(self.global_shape) == len(self.offset) and all(
            start >= 0 and start + n <= size
            for start, n, size in zip(self.offset, shape, self.global_shape, strict=True)
        )
        if not fits:
            raise ValueError(f"a box of shape {shape} at {self.offset} does not lie within {self.global_shape}")


@dataclass(frozen=True, slots=True)
class PerRank:
    """Every rank has its own ``value`` (anything a state may hold), and rank r gets its own back.

    A DTensor or Sharded inside stands for this rank's local part alone, so it cannot be loaded in another layout.
    """

    value: object


@dataclass(frozen=True, slots=True)
class Rank0:
    """The lowest rank that has this ``value`` decides its content; every rank gets that back."""

    value: object
