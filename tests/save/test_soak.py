"""Kills at random moments, again and again: what was acknowledged loads bit for bit, and nothing else is ever seen."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.save import processes
from tests.save.job import Job, committed
from tests.save.test_kill_trainers import check_loads

SAVES = 4  # of each life of the job


def live_and_die(folder: Path, runtime: Path, chance: random.Random, first: int) -> tuple[set[int], int]:
    """One life of a job, in which its agent is killed at a random moment, and then all its ranks; what it was told."""
    durable = set()
    with Job(2, folder, runtime, agent_linger="1s") as job:
        for step in range(first, first + SAVES):
            agent = job.save(step)
            if chance.random() < 0.5:
                time.sleep(chance.random() * 0.1)
                processes.kill(agent)
            if chance.random() < 0.5:
                assert job.all("wait", step) == [None, None]
                durable.add(step)
        time.sleep(chance.random() * 0.1)
        job.kill(*job.living)
    processes.until(lambda: not processes.agents(runtime), "the last agent to end", 60)
    return durable, first + SAVES


def survive(tmp_path: Path, runtime: Path, lives: int, seed: int) -> None:
    print(f"seed {seed}")
    chance, durable, step = random.Random(seed), set[int](), 1
    for _ in range(lives):
        told, step = live_and_die(tmp_path, runtime, chance, step)
        durable |= told
    seen = {step for step in range(1, step) if committed(tmp_path / "store", step)}
    assert durable <= seen
    for step in sorted(seen):
        check_loads(tmp_path / "store", runtime, step, latest=False)


def test_random_kills(tmp_path: Path, runtime: Path) -> None:
    survive(tmp_path, runtime, lives=2, seed=random.SystemRandom().randrange(1 << 32))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("round_", range(10))
def test_random_kills_for_long(tmp_path: Path, runtime: Path, round_: int) -> None:
    survive(tmp_path, runtime, lives=10, seed=random.SystemRandom().randrange(1 << 32))
