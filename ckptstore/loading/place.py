"""Verified bytes into the tensors they belong to, wherever those live."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..format.model import VALUE, SliceKey, itemsize
from .plan import Copy


class Placer:
    """Puts boxes of elements into `targets`, one for each wanted slice: of its shape, any device, strides or type.

    Every box goes straight to its place, so no slice is held whole beside its target. Threads may place at once.
    """

    def __init__(self, wants: Sequence[SliceKey], targets: Sequence[torch.Tensor]) -> None:
        self._wants = wants
        self._targets = [target.detach() for target in targets]  # same memory, no autograd
        self._devices = {target.device for target in targets if target.device.type != "cpu"}

    def __call__(self, data: memoryview, copies: Sequence[Copy]) -> None:
        for copy in copies:
            target, source = self._targets[copy.want], _elements(data, copy, self._wants[copy.want].dtype)
            for axis, (start, size, into) in enumerate(
                zip(copy.inner.offset, copy.inner.shape, copy.into, strict=True)
            ):
                source, target = source.narrow(axis, start, size), target.narrow(axis, into, size)
            with torch.no_grad():  # here, since a thread has its own grad mode
                target.copy_(source)

    def synchronize(self) -> None:
        """Wait for all work on the targets' devices: before placing, the job's; afterwards, the placing itself."""
        for device in self._devices:
            torch.accelerator.synchronize(device)


def _elements(data: memoryview, copy: Copy, dtype: str) -> torch.Tensor:
    """The array that lies in the chunk."""
    count = itemsize(dtype)
    for size in copy.frame:
        count *= size
    found = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=copy.skip)
    if found.data_ptr() % itemsize(dtype):
        found = found.clone()  # chunks lie anywhere in a pack
    return found.view(_torch_dtype(dtype)).view(copy.frame)


def _torch_dtype(name: str) -> torch.dtype:
    """torch's element type of this name; a plain value's bytes are uint8."""
    found = torch.uint8 if name == VALUE else getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
