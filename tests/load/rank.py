"""What every rank does in test_load_ranks: one scenario after the other on stores made beforehand; JSON lines out."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backends import open_backend
from backends.base import Backend
from backends.errors import Permanent, Transient
from backends.testing.faulty import FaultyBackend
from ckptstore import Sharded
from ckptstore.group import Group
from ckptstore.loading.pipeline import load
from ckptstore.loop import Loop

ROWS, COLUMNS = 12, 4
root, group, loop = Path(sys.argv[1]), None, Loop()


def shard(rank: int, size: int) -> Sharded:
    """This rank's rows: one more for each rank, so that no two are alike."""
    cuts = [ROWS * r * (r + 1) // (size * (size + 1)) for r in range(size + 1)]
    local = torch.zeros(cuts[rank + 1] - cuts[rank], COLUMNS)
    return Sharded(local, (ROWS, COLUMNS), (cuts[rank], 0))


def scenario(
    name: str,
    store: str,
    step: Any = "latest",
    faults: Callable[[FaultyBackend], object] | None = None,
    extra: Any = None,
) -> None:
    """Load, and write down what became of it and of the state."""
    assert group is not None
    backend: Backend = open_backend(str(root / store))
    if faults is not None:
        backend = FaultyBackend(backend)
        faults(backend)
    touched = []
    shards = shard(group.rank, group.size)
    state = {"w": shards, "epoch": 0} | (extra or {})
    said: dict[str, Any] = {"name": name, "rank": group.rank}
    try:
        report = load(
            backend, loop.run, group, state, step=step, strict=True, cast=False, timeout=20, concurrency=2,
            touching=lambda: touched.append(True),
        )  # fmt: skip
        said |= {"step": report.step, "values": report.values, "fallbacks": report.fallbacks, "missing": report.missing}
    except Exception as error:
        said |= {"error": type(error).__name__, "text": str(error)}
    said |= {"touched": len(touched), "offset": shards.offset[0], "w": shards.tensor.tolist()}
    with (root / f"said-{group.rank}.jsonl").open("a") as file:
        file.write(json.dumps(said) + "\n")


def only(rank: int, operation: str, **what: Any) -> Callable[[FaultyBackend], object]:
    """A fault that only this rank meets."""
    assert group is not None
    return lambda backend: group.rank == rank and backend.inject(operation, **what)


class Fatal(FaultyBackend):
    """Kills the process at its first read of a pack."""

    async def get_range_into(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    global group
    dist.init_process_group("gloo")
    group = Group()
    logging.basicConfig(filename=root / f"log-{group.rank}", level=logging.WARNING)
    scenario("resharded", "good")
    scenario("empty", "nothing")
    scenario("absent", "good", step=15)
    scenario("corrupt", "bad")
    scenario("corrupt step", "bad", step=20)
    scenario("damaged on the way", "good", faults=only(2, "get_range", damage=lambda data: data[::-1]))
    scenario("refused", "good", faults=only(3, "get_range_into", error=Permanent))
    scenario("history refused", "good", faults=only(0, "list", error=Transient))
    scenario("mismatch", "good", extra={"extra": torch.zeros(3)} if group.rank == 1 else {})
    scenario("again", "good")
    dist.destroy_process_group()


def die() -> None:
    """Rank 1 dies while it reads."""
    global group
    dist.init_process_group("gloo")
    group = Group()
    if group.rank == 1:
        backend = Fatal(open_backend(str(root / "good")))
        state = {"w": shard(1, 2), "epoch": 0}
        load(
            backend, loop.run, group, state, step="latest", strict=True, cast=False, timeout=20, concurrency=2,
            touching=lambda: None,
        )  # fmt: skip
    scenario("death", "good")


if __name__ == "__main__":
    {"main": main, "die": die}[sys.argv[2]]()
