"""The plan's arithmetic: the grid, the shares, the segment."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.format.model import SHARED, Box, SliceKey, itemsize, whole
from ckptstore.saving import plan

CHUNK = 1 << 20


def key(name: str, count: int, dtype: str = "float32") -> SliceKey:
    return SliceKey(name, SHARED, dtype, (count,), whole((count,)))


slices = st.lists(
    st.tuples(st.integers(1, 700_000), st.sampled_from(["float32", "uint8", "bfloat16", "complex128"])),
    min_size=1,
    max_size=60,
).map(lambda found: [key(f"t{i}", n, dtype) for i, (n, dtype) in enumerate(found)])


@given(slices)
def test_the_grid_covers_every_byte_once_and_aligned(keys: list[SliceKey]) -> None:
    covered: Counter[SliceKey] = Counter()
    for chunk in plan.chunk_grid(keys, {}, CHUNK):
        assert 0 < chunk.size <= CHUNK
        at = 0
        for piece in chunk.pieces:
            assert piece.skip == at
            assert piece.skip % itemsize(piece.key.dtype) == 0
            assert piece.start == covered[piece.key]
            covered[piece.key] += piece.length
            at += piece.length
        assert at == chunk.size
    assert covered == {k: k.nbytes for k in keys}


@given(slices, st.integers(1, 9))
def test_shares_differ_by_at_most_one_chunk(keys: list[SliceKey], ranks: int) -> None:
    grid = plan.chunk_grid(keys, {}, CHUNK)
    loads = dict.fromkeys(range(ranks), 0)
    for chunk, owner in zip(grid, plan.share(grid, list(range(ranks))), strict=True):
        loads[owner] += chunk.size
    assert max(loads.values()) - min(loads.values()) <= max(chunk.size for chunk in grid)


def test_another_number_of_replicas_moves_chunks_and_changes_none() -> None:
    keys = [key(f"t{i}", 1 + 977 * i) for i in range(300)]
    grid = plan.chunk_grid(keys, {}, CHUNK)
    assert grid == plan.chunk_grid(list(reversed(keys)), {}, CHUNK)
    for ranks in ([0, 1, 2, 3], [0, 1, 2]):
        owners = plan.share(grid, ranks)
        assert set(owners) == set(ranks)


def test_a_few_tensors_more_leave_the_others_where_they_are() -> None:
    before = set(plan.chunk_grid([key(f"t{i}", 100) for i in range(500)], {}, CHUNK))
    after = set(plan.chunk_grid([key(f"t{i}", 100) for i in range(501)], {}, CHUNK))
    assert len(before - after) <= 1


def test_a_tied_tensor_has_its_bytes_once() -> None:
    one, two, tiny, twin = key("a", 300_000), key("b", 300_000), key("c", 10), key("d", 10)
    grid = plan.chunk_grid([one, tiny], {one: [two], tiny: [twin]}, CHUNK)
    assert sum(chunk.size for chunk in grid) == one.nbytes + tiny.nbytes
    names = Counter(piece.key.name for chunk in grid for piece in chunk.pieces)
    assert names == {"a": 2, "b": 2, "c": 1, "d": 1}


@given(slices)
def test_the_segment_has_room_for_all_and_nothing_overlaps(keys: list[SliceKey]) -> None:
    grid = plan.chunk_grid(keys, {}, CHUNK)
    layout = plan.lay_out(grid[::2], [(k, False) for k in keys if k.nbytes < 4096])
    spans = sorted((chunk.offset, chunk.offset + chunk.size) for chunk in layout.chunks)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    ends = [end for _, end in spans] + [w.offset + w.key.nbytes for w in layout.witnesses]
    assert layout.size == max(ends, default=0)


def test_witnesses_are_bounded_by_what_a_rank_owns() -> None:
    many = [key(f"t{i}", 200_000) for i in range(1000)]  # 800 kB each
    found = plan.witnesses([*many, key("seed", 4), key("norm", 512)], range(8))
    assert {k.name for k in found} >= {"seed", "norm"}
    assert sum(k.nbytes for k in found) <= sum(k.nbytes for k in many) / 8 / 10 + (1 << 20)
    assert [k.name for k in plan.witnesses([key("large", 1 << 20)], range(2))] == []


@pytest.mark.parametrize(("a", "b", "expected"), [((0, 4), (2, 4), (2, 2)), ((0, 2), (2, 2), None)])
def test_boxes_intersect(a: tuple[int, int], b: tuple[int, int], expected: tuple[int, int] | None) -> None:
    found = Box((a[0],), (a[1],)).intersect(Box((b[0],), (b[1],)))
    assert found == (None if expected is None else Box((expected[0],), (expected[1],)))
