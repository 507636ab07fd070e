"""Loads by real processes: what one rank meets, all ranks act on alike, and none is left waiting."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import open_backend
from ckptstore.format.keys import Attempt
from ckptstore.format.model import Box
from ckptstore.state.values import encode
from tests.load import stores

SHAPE = (12, 4)
REPOSITORY = Path(__file__).parents[2]
PACK = Attempt(1, 20, 20, 0).pack(1, "a", 0)


def weights(step: int) -> torch.Tensor:
    return torch.arange(48, dtype=torch.float32).reshape(SHAPE) + 1000 * step


def make(root: Path) -> None:
    """Two stores of steps 10 and 20, saved by three ranks with columns of uneven width.

    In one of them a bit of step 20 is wrong: in the last element of columns 1 and 2, which only the last rank reads.
    """

    async def write(name: str) -> None:
        backend = open_backend(str(root / name))
        await stores.write_run(backend)
        for step in (10, 20):
            columns = [Box((0, 0), (12, 1)), Box((0, 1), (12, 2)), Box((0, 3), (12, 1))]
            nodes = [[stores.piece("w", weights(step), box)] for box in columns]
            nodes[0].append(stores.value("epoch", encode(step, "epoch")))
            await stores.write(backend, step, nodes, chunk=16)
        if name == "bad":
            await stores.replace(backend, PACK, stores.flip)
        await backend.close()

    for name in ("good", "bad"):
        asyncio.run(write(name))


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def heard(root: Path, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """What the ranks wrote down, in order of ranks, by scenario."""
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in range(ranks):
        for line in (root / f"said-{rank}.jsonl").read_text().splitlines():
            found.setdefault(json.loads(line)["name"], []).append(json.loads(line))
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of four ranks that has run all scenarios."""
    root = tmp_path_factory.mktemp("job")
    make(root)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "tests.load.rank", str(root), "main"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-5000:]
    return root


def loaded(said: list[dict[str, Any]], step: int) -> bool:
    """Whether the ranks' shards together are the tensor of this step."""
    assert [one["offset"] for one in said] == [0, 1, 3, 7]
    return torch.equal(torch.tensor([row for one in said for row in one["w"]]), weights(step))


def untouched(said: list[dict[str, Any]]) -> bool:
    return not any(one["touched"] or any(map(any, one["w"])) for one in said)


@pytest.mark.parametrize("name", ["resharded", "again"])
def test_four_ranks_load_what_three_saved(job: Path, name: str) -> None:
    said = heard(job, 4)[name]
    assert loaded(said, 20)
    for one in said:
        assert (one["step"], one["values"], one["fallbacks"], one["touched"]) == (20, {"epoch": 20}, [], 1)


def test_an_empty_store_and_an_absent_step_are_the_same_everywhere(job: Path) -> None:
    said = heard(job, 4)
    assert untouched(said["empty"] + said["absent"])
    assert [one["step"] for one in said["empty"]] == [None] * 4
    assert [one["error"] for one in said["absent"]] == ["StepNotFound"] * 4


def test_corruption_that_one_rank_meets_makes_all_fall_back(job: Path) -> None:
    said = heard(job, 4)["corrupt"]
    assert loaded(said, 10)
    for one in said:
        [(step, reason)] = one["fallbacks"]
        assert step == 20
        assert str(PACK) in reason
        assert (one["step"], one["values"]) == (10, {"epoch": 10})
        assert reason == said[0]["fallbacks"][0][1]
    log = (job / "log-0").read_text()
    assert log.count(str(PACK)) == 1
    assert "step 20 cannot be loaded" in log
    assert "falling back to step 10" in log


def test_a_step_asked_for_by_number_does_not_fall_back(job: Path) -> None:
    for one in heard(job, 4)["corrupt step"]:
        assert one["error"] == "CorruptCheckpoint"
        assert str(PACK) in one["text"]
        assert "'w'" in one["text"]


def test_a_part_damaged_on_its_way_to_one_rank_makes_all_fall_back(job: Path) -> None:
    said = heard(job, 4)["damaged on the way"]
    assert loaded(said, 10)
    assert all("parts/" in one["fallbacks"][0][1] for one in said)


def test_a_refusal_to_one_rank_is_raised_by_all_and_names_it(job: Path) -> None:
    said = heard(job, 4)["refused"]
    assert [one["error"] for one in said] == ["CheckpointError"] * 3 + ["Permanent"]
    assert all("rank 3" in one["text"] and "Permanent" in one["text"] for one in said[:3])
    assert all(one["touched"] == 1 for one in said)
    said = heard(job, 4)["history refused"]
    assert [one["error"] for one in said] == ["Transient"] + ["CheckpointError"] * 3
    assert untouched(said)


def test_a_state_that_does_not_fit_on_one_rank_is_refused_by_all(job: Path) -> None:
    said = heard(job, 4)["mismatch"]
    assert [one["error"] for one in said] == ["StateMismatch"] * 4
    assert all("extra" in one["text"] and "rank 1" in one["text"] for one in said)
    assert untouched(said)


def test_the_death_of_a_rank_is_an_error_on_the_others(tmp_path: Path) -> None:
    make(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.load.rank", str(tmp_path), "die"]
    ranks = [
        subprocess.Popen(command, cwd=REPOSITORY, env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == -9, errors[1]
    [one] = heard(tmp_path, 1)["death"]
    assert one["error"] == "CheckpointError", errors[0]
    assert "lost the other ranks" in one["text"]
