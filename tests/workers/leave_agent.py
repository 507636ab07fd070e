"""Save, stop the agent, and end without a word, as a job does that is killed: the agent must hold nobody."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from ckptstore import CheckpointStore


def main() -> None:
    dist.init_process_group("gloo")
    store = CheckpointStore(sys.argv[1], agent_linger="1s")
    handle = store.save(1, {"a": torch.arange(1 << 16)})
    handle.wait_staged(30)
    dist.barrier()
    if dist.get_rank() == 0:
        assert store._saver._client.agent_pid is not None
        os.kill(store._saver._client.agent_pid, signal.SIGSTOP)
    dist.barrier()
    print("the job's last words", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
