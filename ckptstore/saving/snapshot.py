"""Phase one: copy what this rank owns from its tensors into a segment of shared host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from backends.sharedmem import Segment

from ..agent.submission import RankPlan, SubmittedValue
from ..errors import StorageFull, WaitTimeout
from ..format.model import SliceKey
from .digest import as_bytes
from .planner import SavePlan

if TYPE_CHECKING:
    from ..state import Captured

_SLACK = 1 << 20  # room for values that grow


@dataclass(eq=False)
class Buffer:
    """A segment, and the views of it that one plan's copies go to."""

    segment: Segment
    busy: bool = False
    plan: RankPlan | None = None
    bytes: torch.Tensor = field(init=False)
    whole: list[tuple[int, torch.Tensor]] = field(default_factory=list)  #: copies of whole slices: which, where to
    runs: list[tuple[int, int, int, torch.Tensor]] = field(default_factory=list)  #: of bytes [start, end) of a slice

    def __post_init__(self) -> None:
        self.bytes = torch.frombuffer(self.segment.buffer, dtype=torch.uint8)

    def arrange(self, plan: SavePlan, captured: Captured) -> None:
        """Make the views for this plan, once."""
        if self.plan is plan.rank_plan:
            return
        self.plan, self.whole, self.runs = plan.rank_plan, [], []
        index = {tensor.key: i for i, tensor in enumerate(captured.tensors)}
        for key, start, length, at in _copies(plan.rank_plan):
            where, tensor = self.bytes[at : at + length], captured.tensors[index[key]].tensor
            if length == key.nbytes and _copies_as_is(tensor):
                self.whole.append((index[key], where.view(tensor.dtype).view(tensor.shape)))
            else:
                self.runs.append((index[key], start, start + length, where))

    def fill(self, captured: Captured) -> None:
        """Copy. When this returns the tensors may change."""
        tensors = captured.tensors
        with torch.no_grad():
            if self.whole:
                torch._foreach_copy_([view for _, view in self.whole], [tensors[i].tensor for i, _ in self.whole])
            last, source = -1, self.bytes
            for i, start, end, where in self.runs:
                if i != last:
                    last, source = i, as_bytes(tensors[i].tensor)
                where.copy_(source[start:end])

    def put_values(self, plan: SavePlan, captured: Captured) -> list[SubmittedValue]:
        """Write the plain values behind the planned bytes; equal ones once."""
        at, placed, found = plan.size, dict[bytes, int](), []
        for value in captured.values:
            role = plan.values[value.name, value.rank]
            if not (role.owned or role.replicated):
                continue
            if value.data not in placed:
                placed[value.data] = at
                self.segment.buffer[at : at + len(value.data)] = value.data
                at += len(value.data)
            where = (placed[value.data], len(value.data))
            found.append(SubmittedValue(value.name, value.rank, *where, role.owned, role.replicated, role.across))
        return found


class Pool:
    """The segments of this rank: as many snapshots as may be in memory at a time."""

    def __init__(self, buffers: int, host_memory: int | None) -> None:
        self.limit, self.host_memory = buffers, host_memory
        self._buffers: list[Buffer] = []
        self._changed = threading.Condition()
        self._warming: threading.Thread | None = None
        self._closed = False

    def take(self, size: int, timeout: float, waiting_for: Callable[[], str]) -> Buffer:
        """A buffer of at least `size` bytes that no upload is reading.

        :raises WaitTimeout: all buffers stayed busy. :raises StorageFull: host memory has no room.
        """
        self._finish_warming()
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                free = [buffer for buffer in self._buffers if not buffer.busy]
                fitting = next((buffer for buffer in free if buffer.segment.size >= size), None)
                if fitting is None and free:
                    self._drop(free[0])
                if fitting is None and len(self._buffers) < self.limit:
                    fitting = self._make(size)
                    self._buffers.append(fitting)
                if fitting is not None:
                    fitting.busy = True
                    return fitting
                if not self._changed.wait(deadline - time.monotonic()):
                    raise WaitTimeout(f"all {self.limit} buffers were busy for {timeout:g} s with {waiting_for()}")

    def give_back(self, buffer: Buffer) -> None:
        with self._changed:
            buffer.busy = False
            if self._closed:
                self._drop(buffer)
            self._changed.notify_all()

    def warm(self, size: int) -> None:
        """Make the buffers that later saves of about `size` bytes will need, in the background."""

        def work() -> None:
            with self._changed:
                missing = self.limit - len(self._buffers)
            for _ in range(missing):
                try:
                    buffer = self._make(size)
                except StorageFull:
                    return  # the save that needs it will say so
                with self._changed:
                    self._buffers.append(buffer)

        if self._warming is None and len(self._buffers) < self.limit:
            self._warming = threading.Thread(target=work, name="ckptstore-warm", daemon=True)
            self._warming.start()

    @property
    def held(self) -> int:
        """Bytes of all segments."""
        return sum(buffer.segment.size for buffer in self._buffers)

    def close(self) -> None:
        """Let go of the segments; those still being uploaded live on in the agent."""
        self._finish_warming()
        with self._changed:
            self._closed = True
            for buffer in list(self._buffers):
                if not buffer.busy:
                    self._drop(buffer)

    def _make(self, size: int) -> Buffer:
        size = with_slack(size)
        return Buffer(_segment(size, self.host_memory, self.held + size))

    def _drop(self, buffer: Buffer) -> None:
        self._buffers.remove(buffer)
        del buffer.bytes, buffer.whole, buffer.runs
        buffer.segment.close()

    def _finish_warming(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None


def room_for(plan: SavePlan, captured: Captured) -> int:
    """Bytes that a segment for this snapshot must have."""
    return plan.size + sum(len(value.data) for value in captured.values)


def with_slack(size: int) -> int:
    return -(-(size + _SLACK) // 4096) * 4096


def _segment(size: int, host_memory: int | None, total: int) -> Segment:
    if host_memory is not None and total > host_memory:
        raise StorageFull(f"snapshots need {total} bytes of host memory; HOST_MEMORY allows {host_memory}")
    try:
        segment = Segment.create(size, "ckptstore")
        segment.prefault()
    except (MemoryError, OSError) as error:
        raise StorageFull(f"host memory has no room for a snapshot of {size} bytes: {error}") from error
    return segment


def _copies(plan: RankPlan) -> list[tuple[SliceKey, int, int, int]]:
    """Slice, first byte, bytes, place in the segment of each copy; neighbours joined, aliases left out."""
    found: list[tuple[SliceKey, int, int, int]] = []
    for chunk in plan.chunks:
        covered = -1
        for piece in chunk.pieces:
            if piece.skip <= covered:  # another name of the same bytes
                continue
            covered = piece.skip
            at = chunk.offset + piece.skip
            if found:
                key, start, length, place = found[-1]
                if key == piece.key and start + length == piece.start and place + length == at:
                    found[-1] = (key, start, length + piece.length, place)
                    continue
            found.append((piece.key, piece.start, piece.length, at))
    end = max((chunk.offset + chunk.size for chunk in plan.chunks), default=0)
    for witness in plan.witnesses:
        if witness.offset >= end:  # behind the chunks, so in none of them
            found.append((witness.key, 0, witness.key.nbytes, witness.offset))
    return found


def _copies_as_is(tensor: torch.Tensor) -> bool:
    return tensor.dtype != torch.float4_e2m1fn_x2  # which torch cannot copy element by element
