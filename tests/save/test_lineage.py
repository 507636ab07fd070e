"""Which checkpoints are the history when runs resume, roll back, come back from the dead or race."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckptstore import (
    CheckpointStore,
    CorruptCheckpoint,
    LineageError,
    SaveFailed,
    SaveHandle,
    StepExists,
    StepNotFound,
    Superseded,
    WaitTimeout,
)

Open = Callable[[], CheckpointStore]


@pytest.fixture
def open_store(tmp_path: Path, runtime_dir: Path) -> Iterator[Open]:
    """Opens the same store again and again, as starts of a job would."""
    stores: list[CheckpointStore] = []

    def open_() -> CheckpointStore:
        stores.append(CheckpointStore(str(tmp_path / "store"), timeout=30))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


def begin(store: CheckpointStore, step: int, value: float | None = None, overwrite: bool = False) -> SaveHandle:
    x = torch.full((8,), float(step if value is None else value), dtype=torch.float64)
    return store.save(step, {"x": x}, overwrite=overwrite)


def save(store: CheckpointStore, step: int, value: float | None = None, overwrite: bool = False) -> None:
    begin(store, step, value, overwrite).wait(30)


def loaded(store: CheckpointStore, step: int | None = None) -> tuple[int | None, float]:
    x = torch.zeros(8, dtype=torch.float64)
    report = store.load({"x": x}) if step is None else store.load({"x": x}, step=step)
    return report.step, float(x[0])


def test_an_abandoned_run_is_hidden_by_the_one_that_resumed_before_it(open_store: Open) -> None:
    first = open_store()
    for step in range(10, 101, 10):
        save(first, step)
    second = open_store()
    assert loaded(second, 50) == (50, 50.0)
    save(second, 60, 0.5)
    crashed = open_store()  # and resumes
    assert loaded(crashed) == (60, 0.5)
    assert crashed.steps() == [10, 20, 30, 40, 50, 60]


def test_a_zombie_is_told_and_never_shown(open_store: Open) -> None:
    zombie = open_store()
    for step in (50, 100):
        save(zombie, step)
    second = open_store()
    loaded(second, 50)
    save(second, 60)
    handle = begin(zombie, 110)
    with pytest.raises(Superseded, match="run 2 resumed from step 50"):
        handle.wait(30)
    assert open_store().latest_step() == 60
    with pytest.raises(Superseded):
        begin(zombie, 120)
    with pytest.raises(Superseded):  # and again: this job is over
        begin(zombie, 130)


def test_of_two_jobs_at_one_step_one_wins(open_store: Open) -> None:
    one, two = open_store(), open_store()
    save(one, 1)
    assert loaded(two) == (1, 1.0)
    assert loaded(one) == (1, 1.0)
    handles = [begin(one, 2, 0.1), begin(two, 2, 0.2)]
    errors = [handle.exception(30) for handle in handles]
    assert [type(error) for error in errors].count(Superseded) == 1
    winner = 0.1 if errors[0] is None else 0.2
    step, value = loaded(open_store())
    assert (step, value) == (2, winner)


def test_a_run_that_did_not_load_goes_on_behind_the_latest(open_store: Open) -> None:
    save(open_store(), 10)
    later = open_store()
    save(later, 20)
    assert later.steps() == [10, 20]
    with pytest.raises(LineageError, match=r"load\(\).*rollback\(10\).*another URL"):
        save(open_store(), 15)
    with pytest.raises(LineageError, match=r"load\(\) first to go on from there; or use another URL"):
        save(open_store(), 5)
    with pytest.raises(StepExists):
        save(open_store(), 20)
    assert open_store().steps() == [10, 20]


def test_loading_an_empty_store_starts_from_scratch(open_store: Open) -> None:
    store = open_store()
    x = torch.ones(8)
    report = store.load({"x": x})
    assert report.step is None
    assert report.values == {}
    assert float(x[0]) == 1.0
    save(store, 0)
    assert store.steps() == [0]


def test_reading_makes_nothing(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    assert store.load({"x": torch.zeros(8)}).step is None
    assert store.steps() == []
    assert store.latest_step() is None
    assert not (tmp_path / "store").exists()


def test_a_step_is_stored_once_unless_overwritten(open_store: Open) -> None:
    store = open_store()
    save(store, 1, 0.1)
    with pytest.raises(StepExists, match="overwrite=True"):
        save(store, 1, 0.2)
    assert loaded(open_store()) == (1, 0.1)
    save(store, 1, 0.3, overwrite=True)
    assert loaded(open_store()) == (1, 0.3)
    again = open_store()
    loaded(again)
    with pytest.raises(StepExists):
        save(again, 1, 0.4)
    save(again, 1, 0.5, overwrite=True)
    assert loaded(open_store()) == (1, 0.5)
    assert open_store().steps() == [1]


def test_rollback_gives_up_what_came_later(open_store: Open) -> None:
    store = open_store()
    for step in (1, 2, 3):
        save(store, step)
    with pytest.raises(StepNotFound):
        store.rollback(7)
    store.rollback(2)
    assert store.steps() == [1, 2]
    assert loaded(store) == (2, 2.0)
    save(store, 3, 0.3)
    assert loaded(open_store()) == (3, 0.3)


def test_loading_again_in_one_process_goes_back(open_store: Open) -> None:
    """After a spike in the loss, a loop loads an older step and goes on from there."""
    store = open_store()
    for step in (1, 2, 3):
        save(store, step)
    assert loaded(store, 1) == (1, 1.0)
    save(store, 2, 0.2)
    assert store.steps() == [1, 2]
    assert loaded(store) == (2, 0.2)


def test_a_missing_step_is_named(open_store: Open) -> None:
    store = open_store()
    save(store, 1)
    with pytest.raises(StepNotFound, match="step 5"):
        loaded(store, 5)


def test_a_zombie_cannot_replace_what_a_newer_run_stands_on(open_store: Open) -> None:
    zombie = open_store()
    for step in (10, 20):
        save(zombie, step)
    second = open_store()
    loaded(second, 20)
    save(second, 21)
    handle = begin(zombie, 20, 0.5, overwrite=True)
    with pytest.raises(Superseded):
        handle.wait(30)
    assert loaded(open_store(), 20) == (20, 20.0)


def test_a_run_that_is_gone_is_not_an_empty_store(open_store: Open, tmp_path: Path) -> None:
    save(open_store(), 1)
    (tmp_path / "store" / "runs" / "000001.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"runs/000001\.json"):
        loaded(open_store())
    with pytest.raises(CorruptCheckpoint, match=r"runs/000001\.json"):
        save(open_store(), 2)


def test_a_save_that_found_no_buffer_can_be_tried_again(open_store: Open, tmp_path: Path) -> None:
    with CheckpointStore(str(tmp_path / "store"), buffers=1, timeout=1) as store:
        save(store, 1)
        pid = store._saver._client.agent_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            first = begin(store, 2)
            with pytest.raises(WaitTimeout, match="step"):
                begin(store, 3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert isinstance(first.exception(30), SaveFailed | None)
        save(store, 3)
        assert store.steps()[-1] == 3
