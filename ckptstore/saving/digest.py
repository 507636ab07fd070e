"""Digests by which ranks prove that they hold the same: quick ones, not those that stored bytes are checked with."""

from __future__ import annotations

import torch
import xxhash


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """xxh3_128 of the tensor's elements in row-major order."""
    return xxhash.xxh3_128_digest(as_bytes(tensor.detach().cpu()).numpy().data)


def value_digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a CPU tensor as a flat tensor of uint8; a copy only where they do not lie in row-major order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
