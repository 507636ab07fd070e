"""Two ranks: what fails on one of them fails that save on both, at once and by name, and no save after it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptstore import CheckpointStore, PerRank, SaveHandle
from tests.ranks import report


def outcome(work: Callable[[], SaveHandle | None]) -> str:
    """How a save ends, in the call or after it."""
    try:
        handle = work()
        if handle is not None:
            handle.wait(60)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "durable"


def main() -> None:
    dist.init_process_group("gloo")
    rank, base = dist.get_rank(), Path(sys.argv[1])
    found: dict[str, Any] = {}
    x = torch.zeros(64)
    with CheckpointStore(str(base / "one"), timeout=20) as store:

        def save(step: int, more: dict[str, Any] | None = None, metrics: dict[str, float] | None = None) -> str:
            return outcome(lambda: store.save(step, {"x": x, "y": 0, **(more or {})}, metrics))

        found["first"] = save(1)
        found["unsupported"] = save(2, {"y": object() if rank else 0})
        found["after unsupported"] = save(3)
        found["metrics"] = save(4, metrics={"loss": float("nan" if rank == 0 else "0")})
        found["again"] = save(4, metrics={"loss": 1.0})
        grown = {"adapter": PerRank(torch.ones(3))} if rank else {}
        found["structure"] = [save(step, grown) for step in (5, 6, 7, 8)]
        found["all change"] = save(9, {"z": torch.ones(5)})
        found["steps"] = store.steps()
    with CheckpointStore(str(base / "raise"), timeout=20, on_error="raise") as store:
        store.save(1, {"x": x}).wait()
        raised = []
        for step in range(2, 9):
            x[0] = rank if step == 2 else 0
            try:
                handle = store.save(step, {"x": x})
                if step == 2 and rank == 0:
                    handle.exception(60)  # the user of one rank has been told
            except Exception as error:
                raised.append([step, type(error).__name__])
        store.wait(60)
        found["raised"], found["raise steps"] = raised, store.steps()
    with CheckpointStore(str(base / "late"), timeout=1) as store:  # one rank does not come to the first save
        found["missing"] = outcome(lambda: store.save(1, {"x": x})) if rank == 0 else ""
        dist.barrier()
        found["missing rank 0"] = outcome(lambda: store.save(1, {"x": x})) if rank == 1 else ""
        dist.barrier()
        found["all there"] = outcome(lambda: store.save(1, {"x": x}))
    with CheckpointStore(str(base / "s"), chunk_size=(1 + rank) << 20) as store:
        found["settings"] = outcome(lambda: store.save(1, {"x": x}))
    found["memory"] = outcome(lambda: CheckpointStore("memory://x").save(1, {"x": x}))
    report(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
