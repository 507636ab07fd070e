"""Two ranks: what happens when they hold different content under one name, marked and unmarked."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ckptstore import CheckpointError, CheckpointStore, PerRank, Rank0
from tests.ranks import report


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    base = Path(sys.argv[1])
    found: dict[str, Any] = {}

    def store(name: str, **settings: Any) -> CheckpointStore:
        return CheckpointStore(str(base / name), **settings)

    def error(work: Any) -> str:
        try:
            work()
        except CheckpointError as problem:
            return f"{type(problem).__name__}: {problem}"
        return "none"

    large = torch.zeros(1 << 20)
    large[-1] = rank  # one of a million elements
    with store("first") as s:
        found["tensor"] = error(lambda: s.save(1, {"inner": {"expert": large}}))
        found["value"] = error(lambda: s.save(1, {"epoch": rank}))
        found["shape"] = error(lambda: s.save(1, {"x": torch.zeros(4 + rank)}))
        found["only one rank fails"] = error(lambda: s.save(1, {"x": object() if rank else 1}))
        found["nothing"] = s.steps()
        s.save(1, {"epoch": 1, "same": torch.ones(1 << 20)}).wait()  # and it is as if nothing had happened
        found["after"] = s.steps()

    with store("marked") as s:
        norm = nn.BatchNorm1d(2)
        norm.register_buffer("running_mean", torch.full((2,), float(rank)))
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        state = {
            "mine": PerRank({"large": large, "n": rank}),
            "first": Rank0(rank),
            "rng": PerRank(states),
            "norm": norm,
        }
        s.save(1, state, per_rank=["norm/running_mean"]).wait()
        drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
        other, fresh = torch.zeros(1 << 20), nn.BatchNorm1d(2)
        template = {"mine": PerRank({"large": other, "n": 0}), "first": Rank0(0), "rng": PerRank(states), "norm": fresh}
        loaded = s.load(template)
        restored: Any = loaded.values["rng"]
        random.setstate(restored["python"])
        np.random.set_state(restored["numpy"])
        torch.set_rng_state(states["torch"])
        again = [random.random(), np.random.rand(), torch.rand(1).item()]
        found["rng"] = drawn == again
        found["mine"] = [
            other[-1].item(),
            loaded.values["mine"],
            loaded.values["first"],
            fresh.get_buffer("running_mean")[0].item(),
        ]

    with store("later", check_replicas=3) as s:  # alike at the first save, different later
        small, big, seed = torch.zeros(16), torch.zeros(1 << 20), {"n": 0}
        late = {"small": small, "big": big}
        s.save(1, {**late, "seed": seed}).wait()
        small[3] = rank
        found["later small"] = error(s.save(2, {**late, "seed": seed}).wait)
        small[3], big[7] = 0, rank
        found["later big"] = error(s.save(3, {**late, "seed": seed}).wait)
        big[7] = 0
        found["later value"] = error(s.save(4, {**late, "seed": {"n": rank}}).wait)
        found["later well"] = error(s.save(5, {**late, "seed": seed}).wait)
        found["later steps"] = s.steps()

    with store("buffers") as s:
        norm = nn.BatchNorm1d(2)
        norm.register_buffer("running_mean", torch.full((2,), 5.0 + rank))
        s.save(1, {"norm": norm}).wait()
        fresh = nn.BatchNorm1d(2)
        s.load({"norm": fresh})
        found["buffer"] = fresh.get_buffer("running_mean")[0].item()

    with store("differ", timeout=5) as s:  # what the ranks disagree about besides content
        found["step"] = error(lambda: s.save(1 + rank, {"x": torch.zeros(4)}))
        s.save(1, {"x": torch.zeros(4)}).wait()
        x = torch.zeros(4)
        found["later step"] = error(s.save(2 + rank, {"x": x}).wait)
        found["and on"] = error(s.save(9, {"x": x}).wait)
    report(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
