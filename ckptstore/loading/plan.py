"""The read plan of one rank: which ranges of which packs it reads, and where their bytes go. Pure: no I/O, no torch.

Saved slices and wanted slices are boxes of tensors. A wanted box is cut among the saved boxes that cover it, so that
every element comes from exactly one of them. The bytes of a saved box lie in chunks as runs of its row-major order; a
run is at most ``2 * dimensions - 1`` boxes, and what those have in common with the wanted box is what is copied.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import CorruptCheckpoint
from ..format.model import Box, SliceKey, itemsize
from ..format.part import Chunk, Extent

MAX_READ = 16 << 20  #: bytes of one request, unless a chunk is larger
MAX_GAP = 64 << 10  #: bytes that are read and thrown away rather than asking twice

Shape = tuple[int, ...]


class Saved:
    """The slices stored under one name for one rank, to be found by box; all of one element type and shape."""

    def __init__(self, slices: Sequence[tuple[SliceKey, list[Extent]]]) -> None:
        self.key = slices[0][0]
        self._by_box = {key.box: (key, extents) for key, extents in slices}
        self._sorted = sorted(slices, key=lambda entry: entry[0].box.offset)
        self._starts = [key.box.offset[:1] for key, _ in self._sorted]
        self._tallest = max((key.box.shape[0] for key, _ in slices if key.box.shape), default=0)

    @property
    def whole(self) -> bool:
        """Whether each slice is all of its tensor, rather than a shard."""
        return all(box.shape == self.key.shape for box in self._by_box)

    def meeting(self, box: Box) -> Iterator[tuple[SliceKey, list[Extent]]]:
        """Slices that may have elements of `box`, in row-major order; if one has the very box, that one alone."""
        exact = self._by_box.get(box)
        if exact is not None:
            yield exact
        elif box.offset:
            first = bisect_right(self._starts, (box.offset[0] - self._tallest,))
            last = bisect_left(self._starts, (box.offset[0] + box.shape[0],))
            yield from self._sorted[first:last]


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of elements on its way from a decoded chunk into a wanted slice.

    The chunk's bytes from `skip` on are the row-major elements of an array of shape `frame`; of it `inner` is taken,
    and put into the wanted slice with its first element at `into`.
    """

    want: int  #: position of the slice in the plan's `wants`
    skip: int
    frame: Shape
    inner: Box
    into: Shape


@dataclass(slots=True)
class Read:
    """One request: bytes ``[start, stop)`` of a pack, and the chunks in them with what is copied out of each."""

    pack: str
    start: int
    stop: int
    chunks: list[tuple[Chunk, list[Copy]]]


@dataclass(frozen=True, slots=True)
class Plan:
    wants: Sequence[SliceKey]
    reads: list[Read]


def plan(wants: Sequence[SliceKey], saved: Mapping[tuple[str, int], Saved]) -> Plan:
    """What to read for these slices. A chunk is read once, however many slices lie in it.

    :raises CorruptCheckpoint: some element of a wanted slice is stored nowhere; the message names the slice.
    """
    chunks: dict[Chunk, list[Copy]] = {}
    for index, want in enumerate(wants):
        if want.nbytes:
            for key, extents, piece in _cover(want, saved.get((want.name, want.rank))):
                for chunk, copy in _copies(index, want, key, extents, piece):
                    chunks.setdefault(chunk, []).append(copy)
    return Plan(wants, _coalesce(chunks))


def _cover(want: SliceKey, saved: Saved | None) -> Iterator[tuple[SliceKey, list[Extent], Box]]:
    """Disjoint boxes that together are the wanted one, each with the saved slice it comes from."""
    if saved is None:
        raise CorruptCheckpoint(f"{want.name!r} is not stored")
    left = [want.box]
    for key, extents in saved.meeting(want.box):
        rest = []
        for piece in left:
            common = piece.intersect(key.box)
            if common is None:
                rest.append(piece)
            else:
                yield key, extents, common
                rest += _without(piece, common)
        left = rest
        if not left:
            return
    raise CorruptCheckpoint(f"{want.name!r}: of the elements in {want.box}, those in {left[0]} are stored nowhere")


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """The boxes that `box` falls into once `hole`, which lies inside, is cut out of it."""
    offset, shape = list(box.offset), list(box.shape)
    for axis, (start, size) in enumerate(zip(hole.offset, hole.shape, strict=True)):
        before, after = start - offset[axis], offset[axis] + shape[axis] - start - size
        if before:
            yield Box(tuple(offset), (*shape[:axis], before, *shape[axis + 1 :]))
        if after:
            yield Box((*offset[:axis], start + size, *offset[axis + 1 :]), (*shape[:axis], after, *shape[axis + 1 :]))
        offset[axis], shape[axis] = start, size


def _copies(
    index: int, want: SliceKey, key: SliceKey, extents: list[Extent], piece: Box
) -> Iterator[tuple[Chunk, Copy]]:
    """The copies that bring `piece`, a box inside both slices, from the saved slice `key` into the wanted one."""
    item = itemsize(key.dtype)
    inside = Box(_minus(piece.offset, key.box.offset), piece.shape)
    shift = _minus(key.box.offset, want.box.offset)
    at = 0  # bytes of the slice accounted for
    for extent in extents:
        begin, end = max(extent.start, at), extent.start + extent.length
        if begin > at or begin % item or end % item:
            raise CorruptCheckpoint(f"{key.name!r}: of its {key.nbytes} bytes, no chunk has those at {at}")
        if begin >= end:
            continue
        at = end
        for frame, first in rectangles(key.box.shape, begin // item, end // item):
            common = frame.intersect(inside)
            if common is not None:
                skip = extent.skip + first * item - extent.start
                inner = Box(_minus(common.offset, frame.offset), common.shape)
                yield extent.chunk, Copy(index, skip, frame.shape, inner, _plus(common.offset, shift))
    if at < key.nbytes:
        raise CorruptCheckpoint(f"{key.name!r}: of its {key.nbytes} bytes, no chunk has those from {at} on")


def rectangles(shape: Shape, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The boxes that elements ``[start, stop)`` of an array form, each with the first of its elements."""
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield Box((0,) * len(shape), shape), 0
        return
    row, below = math.prod(shape[1:]), shape[1:]
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _in_row(first, row, below, head, tail)
        return
    if head:
        yield from _in_row(first, row, below, head, row)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in below)), (last - first, *below)), first * row
    yield from _in_row(last, row, below, 0, tail)


def _in_row(index: int, row: int, below: Shape, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    for box, at in rectangles(below, start, stop):
        yield Box((index, *box.offset), (1, *box.shape)), index * row + at


def _coalesce(chunks: dict[Chunk, list[Copy]]) -> list[Read]:
    """Chunks that lie near each other in a pack, in one request."""
    reads: list[Read] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.pack, chunk.offset)):
        stop = chunk.offset + chunk.stored
        last = reads[-1] if reads else None
        if last and last.pack == chunk.pack and chunk.offset <= last.stop + MAX_GAP and stop <= last.start + MAX_READ:
            last.stop = max(last.stop, stop)
            last.chunks.append((chunk, chunks[chunk]))
        else:
            reads.append(Read(chunk.pack, chunk.offset, stop, [(chunk, chunks[chunk])]))
    return reads


def _minus(a: Shape, b: Shape) -> Shape:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _plus(a: Shape, b: Shape) -> Shape:
    return tuple(x + y for x, y in zip(a, b, strict=True))
