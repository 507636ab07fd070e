"""What is left when a store is closed, when a trainer is killed, and after many saves: nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from backends.local import THREADS
from ckptstore import CheckpointStore
from tests.save import processes
from tests.save.job import Job, committed

SIZE = 1 << 20


def state(step: int) -> dict[str, object]:
    return {"a": torch.full((SIZE,), step % 127, dtype=torch.int8), "step": step}


def segments() -> list[str]:
    """Mappings of the store's shared memory segments in this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ckptstore" in line]


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


@dataclass(frozen=True)
class Held:
    """What this process has open, and what runs in it."""

    descriptors: list[str] = field(default_factory=lambda: processes.descriptors("self"))
    threads: list[str] = field(default_factory=threads)
    segments: list[str] = field(default_factory=segments)
    native_threads: int = field(default_factory=lambda: processes.status("self", "Threads"))

    def check_nothing_is_left(self, runtime: Path) -> None:
        """The agent ends, and soon there is no more than there was."""
        processes.until(lambda: not processes.agents(runtime), "the agent to end")
        processes.until(lambda: self.covers(Held()), f"what is held to be as before:\n{self}\n{Held()}")

    def covers(self, other: Held) -> bool:
        same = (self.descriptors, self.threads, self.segments) == (other.descriptors, other.threads, other.segments)
        return same and other.native_threads <= self.native_threads


def save_once(store: Path, runtime: Path, step: int) -> None:
    with CheckpointStore(str(store), runtime_dir=runtime) as saver:
        saver.save(step, state(step)).wait(30)
        assert processes.agents(runtime) and segments()
        assert saver.load(state(0)).step == step


@pytest.fixture
def before(tmp_path: Path, runtime: Path) -> Held:
    """What a process holds that has saved and loaded before."""
    save_once(tmp_path, runtime, 1)
    processes.until(lambda: not processes.agents(runtime), "the agent to end")
    gc.collect()  # what the tests before this one have left in circles
    found = Held()
    assert not found.segments
    return found


def test_nothing_is_left_after_close(tmp_path: Path, runtime: Path, before: Held) -> None:
    for step in range(2, 6):
        save_once(tmp_path, runtime, step)
        before.check_nothing_is_left(runtime)
        assert not list(runtime.glob("*.sock"))


def test_close_while_an_upload_is_under_way(tmp_path: Path, runtime: Path, before: Held) -> None:
    store = CheckpointStore(str(tmp_path), runtime_dir=runtime)
    handle = store.save(2, state(2))
    handle.wait_staged(30)
    store.close()
    handle.wait(30)
    assert committed(tmp_path, 2)
    before.check_nothing_is_left(runtime)
    assert not list(runtime.glob("*.sock"))


def test_close_while_the_agent_is_dead(tmp_path: Path, runtime: Path, before: Held) -> None:
    store = CheckpointStore(str(tmp_path), runtime_dir=runtime)
    store.save(2, state(2)).wait(30)
    processes.kill(processes.the_agent(runtime))
    store.close()
    before.check_nothing_is_left(runtime)


def test_a_trainer_that_is_killed(tmp_path: Path, runtime: Path) -> None:
    """Its death ends the agent after the linger, even though a child of the trainer holds its socket."""
    with Job(1, tmp_path, runtime, agent_linger="1s") as job:
        step = job.new_step()
        job.save(step)
        assert job.all("wait", step) == [None]
        child = job.ask(0, "fork")
        try:
            job.kill()
            assert processes.agents(runtime), "it lingers"
            processes.until(lambda: not processes.agents(runtime), "the agent to end after its linger")
            assert processes.alive(child)
        finally:
            os.kill(child, signal.SIGKILL)
    assert not list(runtime.glob("*.sock"))


def test_many_saves_hold_no_more_than_a_few(tmp_path: Path, runtime: Path) -> None:
    def figures() -> dict[str, object]:
        found: dict[str, object] = {}
        found["threads of the trainer"] = threads()
        for name, pid in (("trainer", os.getpid()), ("agent", agent)):
            found[f"shared memory of the {name}"] = processes.status(pid, "RssShmem")
            if name == "trainer" or os.geteuid() == 0:  # the agent's are nobody else's business
                found[f"descriptors of the {name}"] = processes.descriptors(pid)
        return found

    with CheckpointStore(str(tmp_path), runtime_dir=runtime) as store:
        for step in range(20):
            store.save(step, state(step))  # nobody keeps the handle
        store.wait(30)
        agent = processes.the_agent(runtime)
        before = figures()
        for step in range(20, 50):
            store.save(step, state(step))
        store.wait(30)
        assert figures() == before
        assert processes.status(agent, "Threads") <= 1 + 2 + THREADS  # it hashes with two
        assert len(store.steps()) == 50


def test_failed_saves_hold_nothing(tmp_path: Path, runtime: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may see which descriptors an agent has")
    with CheckpointStore(str(tmp_path / "store"), runtime_dir=runtime) as store:
        store.save(0, state(0)).wait(30)
        agent = processes.the_agent(runtime)
        (tmp_path / "store/packs").rename(tmp_path / "packs")
        (tmp_path / "store/packs").write_text("a file where a folder must be")
        counts = []
        for step in range(1, 9):
            assert store.save(step, state(step)).exception(30) is not None
            counts.append(len(processes.descriptors(agent)))
        assert counts[-1] <= counts[1], counts
