"""The ranks of the job, as far as saving and loading need to talk: bytes gathered, bytes exchanged, a question a step.

A group of its own on gloo, so that nothing here meets the job's own collectives. Without torch.distributed: one rank.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from .errors import CheckpointError, ConfigError, WaitTimeout

_POLL = 0.02  # seconds
_GRACE = datetime.timedelta(seconds=5)  # for rank 0's answer, past the time that it waits itself


class Group:
    """:ivar rank: of this process in the job. :ivar size: ranks in all. :ivar collectives: how many were issued."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, timeout: float = 600) -> None:
        """:param timeout: seconds after which a rank that does not answer counts as lost. Collective."""
        self.rank, self.size, self.collectives = 0, 1, 0
        self._group: dist.ProcessGroup | None = None
        self._background = ThreadPoolExecutor(1, "ckptstore-store")  # its thread starts when first used
        self._timeout = datetime.timedelta(seconds=timeout)
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            if dist.get_rank() not in ranks:
                raise ConfigError(f"rank {dist.get_rank()} is not in the process_group given, which has ranks {ranks}")
            self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
            if self.size > 1:
                local = process_group is not None
                self._group = dist.new_group(ranks, self._timeout, backend="gloo", use_local_synchronization=local)
                self._store = dist.distributed_c10d._get_default_store()
                self._name = f"ckptstore/{self._group.group_name}"

    def meet(self, purpose: str, unless: Callable[[], bool] | None = None) -> None:
        """Wait until all ranks are here, for the same purpose. Unlike a collective, a failure leaves nothing broken.

        Each rank lays a token down in the job's store; rank 0 waits for those of all, and then tells every rank that
        came how it went.

        :param unless: asked now and then; once it says so, whoever is missing will not come.
        :raises WaitTimeout: some did not come in time; on every rank the message names them.
        :raises CheckpointError: they came for different purposes.
        """
        if self._group is None:
            return
        token = secrets.token_hex(8)
        self._store.set(self._here(self.rank), f"{token} {purpose}")
        if self.rank == 0:
            self._call_the_roll(unless)
        verdict = f"{self._name}/go/{token}"
        if not self._wait_for([verdict], self._timeout + _GRACE, unless):
            self._store.delete_key(self._here(self.rank))
            raise WaitTimeout(f"{purpose}: rank 0 did not come within {self._timeout.total_seconds():g} s")
        purposes = json.loads(self._store.get(verdict))
        self._store.delete_key(verdict)
        missing = [rank for rank, other in enumerate(purposes) if other is None]
        if missing:
            raise WaitTimeout(f"{purpose}: ranks {missing} did not come within {self._timeout.total_seconds():g} s")
        for rank, other in enumerate(purposes):
            if other != purpose:
                raise CheckpointError(f"ranks do different things: rank {self.rank} {purpose}, rank {rank} {other}")

    def _wait_for(self, keys: list[str], timeout: datetime.timedelta, unless: Callable[[], bool] | None) -> bool:
        """Whether the keys came."""
        deadline = time.monotonic() + timeout.total_seconds()
        if unless is None:
            with contextlib.suppress(RuntimeError):
                self._store.wait(keys, timeout)
        else:
            while not self._store.check(keys) and not unless() and time.monotonic() < deadline:
                time.sleep(_POLL)
        return bool(self._store.check(keys))

    def pass_by(self, mark: str, old: str | None = None) -> None:
        """Let ranks that wait for a meeting at `mark` know that this one goes on without; in the background.

        :param old: a mark that no rank can wait at any more.
        """
        if self._group is not None:
            self._background.submit(self._store.set, f"{self._name}/passed/{mark}", "")
            if old is not None:
                self._background.submit(self._store.delete_key, f"{self._name}/passed/{old}")

    def passed(self, mark: str) -> bool:
        """Whether some rank has gone on without a meeting at `mark`."""
        return self._group is not None and bool(self._store.check([f"{self._name}/passed/{mark}"]))

    def _call_the_roll(self, unless: Callable[[], bool] | None) -> None:
        """Rank 0's part: wait for all, take their tokens away, and tell each who came for what."""
        here = [self._here(rank) for rank in range(self.size)]
        self._wait_for(here, self._timeout, unless)  # if the time is over, those who came must know who did not
        came = {rank: self._store.get(key).decode().split(" ", 1) for rank, key in enumerate(here) if self._there(key)}
        purposes = [came[rank][1] if rank in came else None for rank in range(self.size)]
        for rank, (token, _) in came.items():
            self._store.delete_key(here[rank])
            self._store.set(f"{self._name}/go/{token}", json.dumps(purposes))

    def _here(self, rank: int) -> str:
        return f"{self._name}/here/{rank}"

    def _there(self, key: str) -> bool:
        return bool(self._store.check([key]))

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
        self._background.shutdown()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
