"""The read plan against brute force: every wanted element arrives, from the right byte, and nothing is read twice."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptCheckpoint
from ckptstore.format.model import Box, SliceKey, whole
from ckptstore.format.part import Chunk, Extent
from ckptstore.loading.plan import MAX_GAP, MAX_READ, Plan, Saved, plan, rectangles

Array = np.ndarray[Any, Any]


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def key(name: str, shape: tuple[int, ...], box: Box, dtype: str = "float32") -> SliceKey:
    return SliceKey(name, -1, dtype, shape, box)


def carry_out(found: Plan, packs: dict[str, bytes]) -> list[Array]:
    """What fetch and place make of the plan, in numpy; elements that are copied twice are an error."""
    arrays = [np.zeros(want.box.shape, np.int32) for want in found.wants]
    times = [np.zeros(want.box.shape, np.int32) for want in found.wants]
    for read in found.reads:
        data = packs[read.pack][read.start : read.stop]
        for chunk, copies in read.chunks:
            inside = data[chunk.offset - read.start :][: chunk.stored]
            for copy in copies:
                frame = np.frombuffer(inside, np.int32, math.prod(copy.frame), copy.skip).reshape(copy.frame)
                into = region(Box(copy.into, copy.inner.shape))
                arrays[copy.want][into] = frame[region(copy.inner)]
                times[copy.want][into] += 1
    assert all((count == 1).all() for count in times)
    return arrays


@st.composite
def tilings(draw: st.DrawFn, box: Box) -> list[Box]:
    """Boxes that together are `box`: cut at random places, unevenly, again and again."""
    boxes = [box]
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(boxes) - 1))
        cut = boxes[at]
        axes = [axis for axis, n in enumerate(cut.shape) if n > 1]
        if axes:
            axis = draw(st.sampled_from(axes))
            n = draw(st.integers(1, cut.shape[axis] - 1))
            rest = (*cut.offset[:axis], cut.offset[axis] + n, *cut.offset[axis + 1 :])
            first = Box(cut.offset, (*cut.shape[:axis], n, *cut.shape[axis + 1 :]))
            second = Box(rest, (*cut.shape[:axis], cut.shape[axis] - n, *cut.shape[axis + 1 :]))
            boxes[at : at + 1] = [first, second]
    return boxes


@st.composite
def inner_boxes(draw: st.DrawFn, box: Box) -> Box:
    spans = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in box.shape]
    return Box(tuple(o + a for o, (a, _) in zip(box.offset, spans, strict=True)), tuple(b - a for a, b in spans))


@st.composite
def stored(
    draw: st.DrawFn, array: Array, boxes: list[Box], pack: str
) -> tuple[list[tuple[SliceKey, list[Extent]]], bytes]:
    """Slices of `array`, cut into chunks at random elements; some chunks have bytes of nobody before and after."""
    blob, slices = b"", []
    for box in boxes:
        data, extents, at = array[region(box)].tobytes(), [], 0
        while at < len(data):
            n = min(len(data) - at, 4 * draw(st.integers(1, 8)))
            before, after = draw(st.binary(max_size=3)), draw(st.binary(max_size=3))
            content = before + data[at : at + n] + after
            chunk = Chunk(bytes(32), pack, len(blob), len(content), len(content))
            extents.append(Extent(key("w", array.shape, box), at, n, len(before), chunk))
            blob, at = blob + content + draw(st.binary(max_size=2)), at + n
        slices.append((key("w", array.shape, box), extents))
    return draw(st.permutations(slices)), blob


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_sharding_loads_into_any_other(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    array = np.arange(1, 1 + math.prod(shape), dtype=np.int32).reshape(shape)
    boxes = data.draw(tilings(whole(shape)))
    if data.draw(st.booleans()):  # boxes that others cover already
        boxes = list(dict.fromkeys([*boxes, *(data.draw(inner_boxes(whole(shape))) for _ in range(2))]))
    slices, blob = data.draw(stored(array, boxes, "packs/p"))
    wants = [key("w", shape, box) for box in [*data.draw(tilings(whole(shape))), data.draw(inner_boxes(whole(shape)))]]
    found = plan(wants, {("w", -1): Saved(slices)})
    for want, loaded in zip(wants, carry_out(found, {"packs/p": blob}), strict=True):
        np.testing.assert_array_equal(loaded, array[region(want.box)])
    chunks = [chunk for read in found.reads for chunk, _ in read.chunks]
    assert len(chunks) == len(set(chunks)), "a chunk is read twice"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_run_of_elements_is_few_boxes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    array = np.arange(math.prod(shape)).reshape(shape)
    found = list(rectangles(shape, start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    elements: list[int] = []
    for box, at in found:
        run = array[region(box)].reshape(-1).tolist()
        assert run == list(range(at, at + len(run))), "not one run"
        elements += run
    assert elements == list(range(start, stop))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_hole_in_what_is_stored_is_corruption(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = data.draw(tilings(whole(shape)))
    array = np.zeros(shape, np.int32)
    slices, _ = data.draw(stored(array, boxes, "packs/p"))
    lost = data.draw(st.integers(0, len(slices) - 1))
    if data.draw(st.booleans()):
        del slices[lost]
    else:
        del slices[lost][1][data.draw(st.integers(0, len(slices[lost][1]) - 1))]
    saved = {("w", -1): Saved(slices)} if slices else {}
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        plan([key("w", shape, whole(shape))], saved)


def test_a_chunk_that_splits_an_element_is_corruption() -> None:
    wanted = key("w", (4,), whole((4,)))
    halves = [Extent(wanted, 0, 6, 0, chunk(0, 6)), Extent(wanted, 6, 10, 0, chunk(6, 10))]
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        plan([wanted], {("w", -1): Saved([(wanted, halves)])})


def test_extents_stored_twice_are_read_once() -> None:
    wanted = key("w", (4,), whole((4,)))
    twice = [
        Extent(wanted, 0, 16, 0, chunk(0, 16)),
        Extent(wanted, 0, 16, 0, chunk(100, 16)),
        Extent(wanted, 8, 8, 0, chunk(200, 8)),
    ]
    [read] = plan([wanted], {("w", -1): Saved([(wanted, twice)])}).reads
    assert (read.start, read.stop) == (0, 16)


def chunk(offset: int, size: int, pack: str = "packs/p") -> Chunk:
    return Chunk(offset.to_bytes(32, "big"), pack, offset, size, size)


def vectors(chunks: list[Chunk]) -> tuple[list[SliceKey], dict[tuple[str, int], Saved]]:
    """One wanted slice for each chunk, which is all of it."""
    wants = [key(f"w{i}", (c.size // 4,), whole((c.size // 4,))) for i, c in enumerate(chunks)]
    return wants, {(w.name, -1): Saved([(w, [Extent(w, 0, c.size, 0, c)])]) for w, c in zip(wants, chunks, strict=True)}


def test_chunks_near_each_other_share_a_request() -> None:
    size = 1 << 20
    wants, saved = vectors([chunk((size + MAX_GAP) * i, size) for i in reversed(range(40))])
    reads = plan(wants, saved).reads
    assert [len(read.chunks) for read in reads] == [15, 15, 10]
    assert all(read.stop - read.start <= MAX_READ for read in reads)
    wants, saved = vectors([chunk((size + MAX_GAP + 1) * i, size) for i in range(40)])
    assert len(plan(wants, saved).reads) == 40
    wants, saved = vectors([chunk(0, size), chunk(0, size, "packs/q"), chunk(size, size)])
    assert [(read.pack, read.start, read.stop) for read in plan(wants, saved).reads] == [
        ("packs/p", 0, 2 * size),
        ("packs/q", 0, size),
    ]
    wants, saved = vectors([chunk(0, 64 << 20)])
    assert [read.stop for read in plan(wants, saved).reads] == [64 << 20]


def test_only_chunks_with_wanted_elements_are_read() -> None:
    """Rows 2 to 4 of a tensor whose rows are a chunk each."""
    shape = (8, 1 << 20)
    saved_key = key("w", shape, whole(shape))
    row = 4 << 20
    extents = [Extent(saved_key, i * row, row, 0, chunk(i * (row + 2 * MAX_GAP), row)) for i in range(8)]
    found = plan([key("w", shape, Box((2, 5), (2, 7)))], {("w", -1): Saved([(saved_key, extents)])})
    assert [read.chunks[0][0] for read in found.reads] == [extents[2].chunk, extents[3].chunk]


def test_ten_thousand_slices_are_planned_in_well_under_a_second() -> None:
    shape, each = (256, 64), 256 * 64 * 4
    wants, saved = [], {}
    for i in range(10_000):  # saved in two halves by rows, loaded in two halves by columns
        slices = []
        for half in range(2):
            saved_key = key(f"w{i}", shape, Box((128 * half, 0), (128, 64)))
            slices.append(
                (saved_key, [Extent(saved_key, 0, each // 2, 0, chunk(i * each + half * each // 2, each // 2))])
            )
        saved[f"w{i}", -1] = Saved(slices)
        wants.append(key(f"w{i}", shape, Box((0, 0), (256, 32)) if i % 2 else slices[0][0].box))
    started = time.process_time()
    found = plan(wants, saved)
    assert time.process_time() - started < 1.0  # 0.35 on a slow core
    assert sum(len(read.chunks) for read in found.reads) == 15_000


def test_a_thousand_shards_of_one_tensor_are_planned_fast() -> None:
    shape = (1000 * 8, 4)
    slices = []
    for i in range(1000):
        saved_key = key("w", shape, Box((8 * i, 0), (8, 4)))
        slices.append((saved_key, [Extent(saved_key, 0, 128, 0, chunk(i * 128, 128))]))
    saved = {("w", -1): Saved(slices)}
    started = time.process_time()
    plan([key("w", shape, whole(shape))], saved)
    for i in range(1000):
        plan([key("w", shape, Box((5 * i, 0), (5, 4)))], saved)
    assert time.process_time() - started < 1.0  # 0.35 on a slow core
