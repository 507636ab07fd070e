"""One rank that does what it is told, line by line, on its standard input; see tests/save/job.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from ckptstore import CheckpointStore, PerRank, SaveHandle, Sharded
from ckptstore.saving import client, snapshot
from tests.save.content import mine, same, sharded


class Driven:
    """Each method is a command."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.store = CheckpointStore()
        self.handles: dict[int, SaveHandle] = {}

    def save(self, step: int) -> int | None:
        """Copy the state of this step; the agent's process id."""
        whole = sharded(step)
        rows = len(whole) // self.ranks
        part = whole[self.rank * rows : (self.rank + 1) * rows].clone()
        state = {
            "sharded": Sharded(part, tuple(whole.shape), (self.rank * rows, 0)),
            "same": same(step),
            "mine": PerRank(mine(step, self.rank)),
            "step": step,
        }
        self.handles[step] = self.store.save(step, state)
        part.zero_()  # the copy is complete
        return self.store._saver._client.agent_pid

    def staged(self, step: int) -> None:
        self.handles[step].wait_staged(50)

    def wait(self, step: int) -> None:
        self.handles[step].wait(50)

    def done(self, step: int) -> bool:
        return self.handles[step].done()

    def train(self) -> float:
        """A collective of the job's own."""
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    def die_while_copying(self) -> None:
        """In the next save, after the collectives and before the agent has the snapshot."""
        snapshot.Buffer.fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    def patience(self, seconds: float) -> None:
        """How long to try to have an agent."""
        client.START_SECONDS = seconds

    def fork(self) -> int:
        """A child that holds all that this process has open."""
        child = os.fork()
        if not child:
            signal.pause()
        return child

    def close(self) -> None:
        self.store.close()
        if self.ranks > 1:
            dist.destroy_process_group()


def main() -> None:
    rank, ranks, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed is no answer
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    driven = Driven(rank, ranks)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer: Any = getattr(driven, command)(*arguments)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
