"""Four ranks on two nodes: each pair has a runtime folder, and so an agent, of its own."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from ckptstore import CheckpointError, CheckpointStore, SaveHandle
from tests.ranks import report


def main() -> None:
    dist.init_process_group("gloo")
    rank, (url, runtime_dir) = dist.get_rank(), sys.argv[1:3]
    node = rank // 2
    found: dict[str, Any] = {}

    def ended(handle: SaveHandle) -> str:
        try:
            handle.wait(40)
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
        return "durable"

    x = torch.arange(1 << 18, dtype=torch.float32)
    small = torch.zeros(8)
    state = {"x": x, "small": small, "n": 0}
    with CheckpointStore(url, runtime_dir=f"{runtime_dir}{node}", timeout=20, chunk_size="64KiB") as store:
        agent = store._saver._client

        def on_one(work: Any) -> None:
            dist.barrier()
            if rank == 2:
                work()
            dist.barrier()

        found["first"] = ended(store.save(1, state))
        small[0] = node  # alike within each node, different between them
        found["nodes differ"] = ended(store.save(2, state))
        small[0] = 0
        found["values differ"] = ended(store.save(3, {**state, "n": node}))
        # node 1's agent is frozen, killed, replaced: the other node's waits
        assert agent.agent_pid is not None
        pid = agent.agent_pid
        on_one(lambda: os.kill(pid, signal.SIGSTOP))
        x.add_(1)
        handle = store.save(4, state)
        on_one(lambda: os.kill(pid, signal.SIGKILL))
        found["agent killed"] = ended(handle)
        # node 1's agent stays away: the other names it at the deadline
    with CheckpointStore(url, runtime_dir=f"{runtime_dir}{node}", timeout=4, chunk_size="64KiB") as store:
        y = torch.zeros_like(x)
        found["loaded"] = store.load({"x": y, "small": small, "n": 0}).step
        found["equal"] = bool((x == y).all())
        store.save(5, state).wait(20)
        assert store._saver._client.agent_pid is not None
        pid = store._saver._client.agent_pid
        on_one(lambda: os.kill(pid, signal.SIGSTOP))
        handle = store.save(6, state)
        if node == 0:
            found["node away"] = ended(handle)
        on_one(lambda: os.kill(pid, signal.SIGCONT))
        if node == 1:
            found["node away"] = ended(handle)
        found["steps"] = store.steps()
        found["well again"] = ended(store.save(7, state))
    report(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
