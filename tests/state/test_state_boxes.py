from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.format.model import Box
from ckptstore.state.boxes import geometry


class Mesh:
    """As much of a device mesh as geometry needs, seen from any coordinate."""

    def __init__(self, shape: tuple[int, ...], coordinate: tuple[int, ...] | None) -> None:
        self.shape = shape
        self.coordinate = coordinate

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


def owned(
    size: int, mesh_shape: tuple[int, ...], placements: tuple[Any, ...], order: Any = None
) -> dict[Any, list[int]]:
    """Which indices of a vector each coordinate has, in the order of its local part."""
    made = {}
    for at in itertools.product(*map(range, mesh_shape)):
        found = geometry((size,), Mesh(mesh_shape, at), placements, order)
        assert found is not None
        local = torch.full(found.local_shape, -1)
        for box, inside in found.boxes:
            part = torch.arange(box.offset[0], box.offset[0] + box.shape[0])
            local[inside.offset[0] : inside.offset[0] + inside.shape[0]] = part
        made[at] = local.tolist()
    return made


def test_three_splits_of_one_dimension_from_right_to_left() -> None:
    placements = (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0))
    expected = {(a, b, c): [4 * c + 2 * b + a] for a, b, c in itertools.product(range(2), repeat=3)}
    assert owned(8, (2, 2, 2), placements) == expected


def test_uneven_splits_from_right_to_left_are_those_of_two_chunks() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    for size in range(1, 20):
        expected = {}
        for tp, outer in enumerate(torch.arange(size).chunk(2)):
            for dp, inner in enumerate(outer.chunk(3)):
                expected[dp, tp] = inner.tolist()
        made = owned(size, (3, 2), placements)
        if all(made[at] == expected.get(at, []) for at in made):
            continue
        # Where torch's own reading of the placements differs, local shapes do, by which capture refuses.
        assert any(len(made[at]) != len(expected.get(at, [])) for at in made), size


def test_a_shard_order_is_followed() -> None:
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    assert owned(8, (2, 2), (Shard(0), Shard(0)), order)[0, 1] == [4, 5]
    assert owned(8, (2, 2), (Shard(0), Shard(0)))[0, 1] == [2, 3]


def test_several_boxes() -> None:
    made = geometry((8, 6), Mesh((2, 2), (1, 0)), (_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)))
    assert made is not None
    assert made.local_shape == (4, 3)
    assert [box for box, _ in made.boxes] == [Box((r, c), (2, 1)) for r in (2, 6) for c in (0, 2, 4)]
    assert [inside for _, inside in made.boxes] == [Box((r, c), (2, 1)) for r in (0, 2) for c in (0, 1, 2)]


def test_outside_the_mesh_there_is_nothing() -> None:
    assert geometry((8,), Mesh((2,), None), (Replicate(),)) is None


def test_an_empty_part() -> None:
    made = geometry((2, 3), Mesh((4,), (3,)), (Shard(0),))
    assert made is not None
    assert (made.local_shape, made.boxes) == ((0, 3), ())
