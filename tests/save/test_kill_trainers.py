"""What survives the death of trainers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from ckptstore import CheckpointStore, PerRank
from ckptstore.format.commit import Aborted
from tests import ranks as torchrun
from tests.save import content, processes
from tests.save.job import Job, committed, intents, slot, temporary


def check_loads(store: Path, runtime: Path, step: int, *, latest: bool = True) -> None:
    """The checkpoint of this step, which is the latest unless said otherwise, loads bit for bit."""
    found = content.blank()
    with CheckpointStore(str(store), runtime_dir=runtime) as reader:
        assert not latest or reader.latest_step() == step
        wanted = {**found, "mine": PerRank(found["mine"]), "step": 0}
        report = reader.load(wanted) if latest else reader.load(wanted, step=step)
    assert report.step == step and report.values == {"step": step} and not report.fallbacks
    for name, tensor in content.expected(step).items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_was_staged_is_committed_though_all_trainers_die(ranks: int, tmp_path: Path, runtime: Path) -> None:
    with Job(ranks, tmp_path, runtime, agent_linger="1s") as job:
        while True:
            step = job.new_step()
            agent = job.save(step)
            assert job.all("staged", step) == [None] * ranks
            processes.stop(agent)
            if not committed(job.store, step):
                break
            assert step < 20, "the agent is always done before it can be stopped"
            processes.go_on(agent)
        job.kill()
        assert not committed(job.store, step)
        processes.go_on(agent)
        processes.until(lambda: committed(job.store, step), "the commit of what was staged")
        processes.until(lambda: not processes.agents(runtime), "the agent to end after its linger")
    check_loads(job.store, runtime, step)
    assert not intents(job.store) and not temporary(job.store)
    assert not list(runtime.glob("*.sock"))


def test_a_rank_that_dies_before_it_submits(tmp_path: Path, runtime: Path) -> None:
    with Job(3, tmp_path, runtime, agent_linger="1s") as job:
        job.ask(2, "die_while_copying")
        for rank in range(3):
            job.tell(rank, "save", 1)
        assert all(isinstance(job.hear(rank), int) for rank in range(2))
        job.kill(2)
        for step in (1, 2):  # in the first save and in a later one
            for answer in job.all("wait", step):
                assert answer["error"] == "SaveFailed" and "ranks [2]" in answer["message"], answer
            found = slot(job.store, step)
            assert isinstance(found, Aborted) and "ranks [2]" in found.reason
            if step == 1:
                job.save(2)
        job.kill()
    assert not temporary(job.store)
    with CheckpointStore(str(job.store), runtime_dir=runtime) as reader:
        assert reader.steps() == []


def test_a_piped_torchrun_returns_though_the_agent_lives(tmp_path: Path, runtime: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    job = torchrun.start("leave_agent", 2, store, out=out, CKPTSTORE_RUNTIME_DIR=str(runtime))
    try:
        output, _ = job.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        torchrun.kill(job)
        for agent in processes.agents(runtime):
            processes.kill(agent)
        pytest.fail(f"torchrun is held:\n{job.communicate()[0]}")
    assert job.returncode == 0, output
    agent = processes.the_agent(runtime)
    assert set(processes.states(agent)) == {"T"}
    processes.go_on(agent)
    processes.until(lambda: committed(store, 1), "the commit")
