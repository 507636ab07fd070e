"""What survives the death of the agent: everything, as long as a trainer lives."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptstore import CheckpointStore
from ckptstore.format.commit import Aborted
from tests.save import processes
from tests.save.job import Job, committed, intents, slot, temporary
from tests.save.test_kill_trainers import check_loads

_TRIES = 20


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks that all tests of this file share."""
    with (
        processes.private_runtime() as runtime,
        Job(2, tmp_path_factory.mktemp("job"), runtime, agent_linger="1s") as job,
    ):
        step = job.new_step()
        job.save(step)
        assert job.all("wait", step) == [None, None]
        yield job


def save_and_stop(job: Job, when: Callable[[int], object]) -> tuple[int, int]:
    """Save a step, and stop the agent as soon as `when(step)` is true; the step and the agent."""
    step, agent = job.new_step(), job.agent
    for rank in job.living:
        job.tell(rank, "save", step)
    processes.until(lambda: when(step), "the upload to get there")
    processes.stop(agent)
    assert [job.hear(rank) for rank in job.living] == [agent] * 2
    return step, agent


def stop_in_upload(job: Job) -> tuple[int, int, str]:
    """A step that is being uploaded by an agent that stands still now; its temporary object."""
    before = set(temporary(job.store))
    for _ in range(_TRIES):
        step, agent = save_and_stop(job, lambda step: set(temporary(job.store)) - before or committed(job.store, step))
        found = set(temporary(job.store)) - before
        if found and not committed(job.store, step):
            return step, agent, found.pop()
        processes.go_on(agent)
        assert job.all("wait", step) == [None, None]
    raise AssertionError("uploads are over before the agent can be stopped")


@contextmanager
def nobody_may_serve(runtime: Path, agent: int) -> Iterator[None]:
    """Kill the agent, and hold the lock that another would need."""
    (path,) = runtime.glob("*.lock")
    lock = os.open(path, os.O_RDWR)
    try:
        processes.kill(agent)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def test_a_new_agent_takes_over(job: Job) -> None:
    step, agent, leftover = stop_in_upload(job)
    with CheckpointStore(str(job.store), runtime_dir=job.runtime) as reader:
        assert reader.steps() and step not in reader.steps()
        assert not list((job.store / "commits").glob(f"{step:012d}.*"))
    processes.kill(agent)
    assert job.all("wait", step) == [None, None]
    assert committed(job.store, step) and job.agent != agent
    check_loads(job.store, job.runtime, step)
    (intent,) = intents(job.store)  # of the killed agent; those of saves that ended are gone
    assert leftover in temporary(job.store)
    assert any(leftover.startswith(prefix) for prefix in intent["writes"])


def test_without_any_agent_training_goes_on(job: Job) -> None:
    job.all("patience", 1.0)
    step, agent, _ = stop_in_upload(job)
    with nobody_may_serve(job.runtime, agent):
        for answer in job.all("wait", step):
            assert answer["error"] == "AgentLost", answer
        assert isinstance(slot(job.store, step), Aborted)
        assert job.all("train") == [2.0, 2.0]
        without = job.new_step()
        job.all("save", without)
        for answer in job.all("wait", without):
            assert answer["error"] == "AgentLost", answer
    job.all("patience", 20.0)
    later = job.new_step()
    job.save(later)
    assert job.all("wait", later) == [None, None]
    check_loads(job.store, job.runtime, later)
    with CheckpointStore(str(job.store), runtime_dir=job.runtime) as reader:
        assert not {step, without} & set(reader.steps())


def test_an_agent_that_dies_before_it_tells(job: Job) -> None:
    for _ in range(_TRIES):
        step, agent = save_and_stop(job, lambda step: committed(job.store, step))
        told = job.all("done", step)
        processes.kill(agent)
        assert job.all("wait", step) == [None, None]
        assert committed(job.store, step)
        check_loads(job.store, job.runtime, step)
        if told == [False, False]:
            return
    raise AssertionError("the agent always tells before it can be killed")
