"""The vocabulary of the format: boxes of tensors, and the element types they may have."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Bytes per element of every element type a checkpoint may hold. Names are torch's.
ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip

VALUE = "value"  #: the element type of a plain value: bytes of its encoding, in one dimension
SHARED = -1  #: `rank` of what belongs to all ranks alike; a PerRank leaf has its owner's rank there.


def itemsize(dtype: str) -> int:
    """Bytes per element. :raises KeyError: an element type that no checkpoint has."""
    return 1 if dtype == VALUE else ITEMSIZE[dtype]


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor: where it starts and how far it goes in each dimension, in elements."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both cover, or None where that is no element."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor of this shape."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class SliceKey:
    """Which bytes a slice is: equal keys on two ranks make them candidates for being replicas.

    A plain value is a slice too: of dtype ``value``, one-dimensional, as long as its encoding.
    """

    name: str
    rank: int
    dtype: str
    shape: tuple[int, ...]  #: of the whole tensor
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)

    @property
    def identity(self) -> tuple[object, ...]:
        """What replicas have in common; a value's length is part of its content."""
        return (
            (self.name, self.rank) if self.dtype == VALUE else (self.name, self.rank, self.dtype, self.shape, self.box)
        )
