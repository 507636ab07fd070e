"""The ranks of the job, as far as saving and loading need to talk: bytes gathered, bytes exchanged, a question a step.

A group of its own on gloo, so that nothing here meets the job's own collectives. Without torch.distributed: one rank.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .errors import CheckpointError, WaitTimeout


class Group:
    """:ivar rank: of this process in the job. :ivar size: ranks in all. :ivar collectives: how many were issued."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: float = 600) -> None:
        """:param timeout: seconds after which a rank that does not answer counts as lost. Collective."""
        self.rank, self.size, self.collectives = 0, 1, 0
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
            if self.size > 1:
                limit, local = datetime.timedelta(seconds=timeout), process_group is not None
                self._group = dist.new_group(ranks, limit, backend="gloo", use_local_synchronization=local)

    def meet(self, purpose: str, timeout: float) -> None:
        """Wait until all ranks are here.

        :raises WaitTimeout: some did not come within `timeout` seconds; rank 0's message names them.
        """
        if self._group is None:
            return
        self.collectives += 1
        try:
            dist.monitored_barrier(self._group, datetime.timedelta(seconds=timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise WaitTimeout(f"{purpose}: not all ranks came within {timeout:g} s: {error}") from error

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of ranks, on every rank."""
        return self.exchange([data] * self.size)

    def exchange(self, data: Sequence[bytes]) -> list[bytes]:
        """Send ``data[r]`` to rank r; return what each rank sent here.

        :raises CheckpointError: another rank died or stopped.
        """
        if self._group is None:
            return list(data)
        self.collectives += 1
        out_sizes = torch.tensor([len(part) for part in data], dtype=torch.int64)
        in_sizes = torch.empty_like(out_sizes)
        out = torch.frombuffer(bytearray(b"".join(data) or b"\0"), dtype=torch.uint8)[: int(out_sizes.sum())]
        try:
            dist.all_to_all_single(in_sizes, out_sizes, group=self._group)
            into = torch.empty(int(in_sizes.sum()), dtype=torch.uint8)
            sizes = in_sizes.tolist()
            dist.all_to_all_single(into, out, sizes, out_sizes.tolist(), group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"rank {self.rank} lost the other ranks: {error}") from error
        whole = into.numpy().tobytes()
        ends = itertools.accumulate(sizes)
        return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; the same answer on all.

        :raises CheckpointError: another rank died or stopped.
        """
        if self._group is None:
            return flag
        self.collectives += 1
        answer = torch.tensor([flag], dtype=torch.uint8)
        try:
            dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"rank {self.rank} lost the other ranks: {error}") from error
        return bool(answer.item())

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
