"""Whole loads in one process: resharding, falling back, and refusing, on real states."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.base import Backend
from backends.errors import Permanent, Transient
from backends.key import ObjectKey
from backends.memory import MemoryBackend
from backends.testing.faulty import FaultyBackend
from ckptstore.errors import CorruptCheckpoint, LoadIncomplete, StateMismatch, StepNotFound, WaitTimeout
from ckptstore.format import commit as commits
from ckptstore.format.keys import COMMITS, Attempt, run_key
from ckptstore.format.model import Box
from ckptstore.group import Group
from ckptstore.loading.pipeline import load as load_pipeline
from ckptstore.loading.report import LoadReport
from ckptstore.state.values import encode
from tests.load import stores

SHAPE = (10, 6)


def weights(step: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.arange(10 * 6, dtype=torch.float32).reshape(shape) + 1000 * step


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend(uuid.uuid4().hex)


def filled(backend: Backend, steps: tuple[int, ...] = (10, 20)) -> list[Attempt]:
    """Checkpoints of ``{"w": weights, "epoch": step}`` by two ranks, half of the rows each."""

    async def write() -> list[Attempt]:
        await stores.write_run(backend)
        made = []
        for step in steps:
            top, bottom = Box((0, 0), (5, 6)), Box((5, 0), (5, 6))
            nodes = [
                [stores.piece("w", weights(step), top), stores.value("epoch", encode(step, "epoch"))],
                [stores.piece("w", weights(step), bottom)],
            ]
            made.append(await stores.write(backend, step, nodes))
        return made

    return asyncio.run(write())


class Loader:
    """Loads ``{"w": ..., "epoch": ...}``; `touched` tells whether the pipeline said that it would change the state."""

    def __init__(self, backend: Backend, state: dict[str, Any] | None = None) -> None:
        self.backend, self.touched = backend, 0
        self.state = state or {"w": torch.zeros(SHAPE), "epoch": -1}

    def __call__(self, step: Any = "latest", **options: Any) -> LoadReport:
        def touching() -> None:
            self.touched += 1

        options = {"strict": True, "cast": False, "timeout": 5, "concurrency": 4} | options
        return load_pipeline(self.backend, asyncio.run, Group(), self.state, step=step, touching=touching, **options)

    def unchanged(self) -> bool:
        return not self.state["w"].any() and not self.touched


def test_the_newest_checkpoint_is_loaded(backend: MemoryBackend) -> None:
    attempt = filled(backend)[1]
    loader = Loader(backend)
    report = loader()
    assert torch.equal(loader.state["w"], weights(20))
    assert (report.step, report.values, report.missing, report.source) == (20, {"epoch": 20}, [], "storage")
    assert report.fallbacks == [] and report.slot == attempt.slot and report.seconds > 0
    parts = sum(len(backend._find(attempt.part(node))[0]) for node in range(2))
    assert report.requests == 4 and report.bytes_read == parts + 10 * 6 * 4 + len(encode(20, "epoch"))
    assert loader.state["epoch"] == -1 and loader.touched == 1
    assert loader(step=10).values == {"epoch": 10} and torch.equal(loader.state["w"], weights(10))


def test_an_empty_store_changes_nothing(backend: MemoryBackend) -> None:
    loader = Loader(backend)
    report = loader()
    assert (report.step, report.values, report.source, report.slot) == (None, {}, "none", None)
    assert loader.unchanged()
    with pytest.raises(StepNotFound, match="step 5"):
        loader(step=5)
    asyncio.run(stores.write_run(backend))
    attempt = Attempt(1, 1, 7, 0)
    asyncio.run(backend.put_if_absent(attempt.slot.key, commits.encode(commits.Aborted(attempt, "SaveFailed", "no"))))
    assert loader().step is None
    with pytest.raises(StepNotFound, match="step 7"):
        loader(step=7)


def boxes(rows: list[int], columns: list[int]) -> list[Box]:
    """A grid with these heights and widths."""
    starts = list(itertools.accumulate(rows, initial=0)), list(itertools.accumulate(columns, initial=0))
    return [Box((r, c), (h, w)) for r, h in zip(starts[0], rows) for c, w in zip(starts[1], columns)]  # noqa: B905


GRIDS = {
    "whole": boxes([10], [6]),
    "rows": boxes([5, 5], [6]),
    "uneven rows": boxes([1, 7, 2], [6]),
    "columns": boxes([10], [2, 2, 2]),
    "uneven columns": boxes([10], [5, 1]),
    "grid": boxes([5, 5], [3, 3]),
    "uneven grid": boxes([4, 4, 2], [4, 2]),
    "rows, one empty": [*boxes([5, 5], [6]), Box((10, 0), (0, 6))],
}


@pytest.mark.parametrize("saved", GRIDS)
@pytest.mark.parametrize("wanted", GRIDS)
@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_every_sharding_loads_as_every_other(saved: str, wanted: str, chunk: int, backend: MemoryBackend) -> None:
    from ckptstore import Sharded

    asyncio.run(stores.write_run(backend))
    nodes = [[stores.piece("w", weights(3), box)] for box in GRIDS[saved]]
    asyncio.run(stores.write(backend, 3, nodes, chunk=chunk))
    for box in GRIDS[wanted]:
        local = torch.full(box.shape, -1.0)
        Loader(backend, {"w": Sharded(local, SHAPE, box.offset)})()
        assert torch.equal(local, weights(3)[box.offset[0] :, box.offset[1] :][: box.shape[0], : box.shape[1]])


def test_a_model_and_its_optimizer_are_restored() -> None:
    backend = MemoryBackend(uuid.uuid4().hex)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    pieces = [stores.piece(f"model/{name}", tensor) for name, tensor in model.state_dict().items()]
    asyncio.run(stores.write_run(backend))
    asyncio.run(stores.write(backend, 1, [pieces]))
    other = torch.nn.Linear(3, 2)
    Loader(backend, {"model": other})()
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    assert other.weight.requires_grad


def test_a_cast_must_be_asked_for(backend: MemoryBackend) -> None:
    filled(backend)
    loader = Loader(backend, {"w": torch.zeros(SHAPE, dtype=torch.float64), "epoch": 0})
    with pytest.raises(StateMismatch, match="float32"):
        loader()
    assert loader.unchanged()
    loader(cast=True)
    assert torch.equal(loader.state["w"], weights(20).double())


def test_a_state_that_does_not_fit_is_refused_and_unchanged(backend: MemoryBackend) -> None:
    filled(backend)
    loader = Loader(backend, {"w": torch.zeros(11, 6), "epoch": 0, "extra": torch.zeros(2)})
    with pytest.raises(StateMismatch, match=r"(?s)(w.*extra|extra.*w)"):
        loader()
    assert loader.unchanged()
    loader = Loader(backend, {"w": torch.zeros(SHAPE), "extra": torch.zeros(2)})
    assert loader(strict=False).missing == ["extra"]
    assert torch.equal(loader.state["w"], weights(20))


Damage = Callable[[bytes], bytes | None]
DAMAGES: dict[str, Damage] = {
    "flip": lambda data: stores.flip(data, len(data) // 2),
    "truncation": lambda data: data[:-1],
    "emptied": lambda data: b"",
    "deletion": lambda data: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["commit", "part", "pack"])
def test_damage_falls_back_loudly_or_is_raised(
    what: str, damage: str, backend: MemoryBackend, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = filled(backend)[1]
    key = {"commit": attempt.slot.key, "part": attempt.part(1), "pack": attempt.pack(1, "a", 0)}[what]
    asyncio.run(stores.replace(backend, key, DAMAGES[damage]))
    loader = Loader(backend)
    gone = what == "commit" and damage == "deletion"  # a checkpoint exists if and only if its commit does
    with pytest.raises(StepNotFound if gone else CorruptCheckpoint, match="step 20" if gone else str(key)):
        loader(step=20)
    with caplog.at_level(logging.WARNING, "ckptstore"):
        report = loader()
    assert report.step == 10 and report.values == {"epoch": 10}
    assert torch.equal(loader.state["w"], weights(10))
    if gone:
        assert report.fallbacks == [] and not caplog.records
        return
    [(step, reason)] = report.fallbacks
    assert step == 20 and str(key) in reason
    [record] = caplog.records
    assert all(text in record.getMessage() for text in ("step 20", str(key), "step 10"))
    asyncio.run(stores.replace(backend, attempt.slot.key if what != "commit" else key, lambda data: data))
    asyncio.run(backend.delete(Attempt(1, 10, 10, 0).slot.key))
    with pytest.raises(CorruptCheckpoint, match=rf"(?s)none.*step 20.*{key}"):
        Loader(backend)()


def test_falling_back_goes_as_far_as_needed(backend: MemoryBackend, caplog: pytest.LogCaptureFixture) -> None:
    attempts = filled(backend, (10, 20, 30, 40))
    asyncio.run(stores.replace(backend, attempts[3].pack(0, "a", 0), lambda data: stores.flip(data, 5)))
    asyncio.run(stores.replace(backend, attempts[2].slot.key, stores.flip))
    asyncio.run(backend.delete(attempts[1].part(0)))
    loader = Loader(backend)
    report = loader()
    assert report.step == 10 and [step for step, _ in report.fallbacks] == [40, 30, 20]
    assert torch.equal(loader.state["w"], weights(10))
    assert [record.args[0] for record in caplog.records if record.args] == [40, 30, 20]  # type: ignore[index]


def test_a_damaged_run_leaves_the_history_unknown(backend: MemoryBackend) -> None:
    filled(backend)
    asyncio.run(stores.replace(backend, run_key(1), stores.flip))
    with pytest.raises(CorruptCheckpoint, match=str(run_key(1))):
        Loader(backend)()


def test_what_was_resumed_before_is_not_loaded(backend: MemoryBackend) -> None:
    filled(backend, (10, 20, 30))
    asyncio.run(stores.write_run(backend, 2, resumed_from=20))
    assert Loader(backend)().step == 20
    with pytest.raises(StepNotFound):
        Loader(backend)(step=30)


@pytest.mark.parametrize("operation", ["list", "get", "get_range", "get_range_into"])
@pytest.mark.parametrize("error", [Permanent, Transient])
@pytest.mark.parametrize("step", ["latest", 20])
def test_a_refusal_never_falls_back(operation: str, error: type[Exception], step: Any, backend: MemoryBackend) -> None:
    filled(backend)
    faulty = FaultyBackend(backend)
    fault = faulty.inject(operation, error=error)  # type: ignore[arg-type]
    loader = Loader(faulty)
    with pytest.raises(error, match="injected"):
        loader(step=step)
    assert fault.fired
    assert loader.touched == (operation == "get_range_into")


@pytest.mark.parametrize("operation", ["list", "get", "get_range", "get_range_into"])
def test_storage_that_does_not_answer_is_a_timeout(operation: str, backend: MemoryBackend) -> None:
    filled(backend)
    faulty = FaultyBackend(backend)
    fault = faulty.inject(operation, call=2 if operation == "get" else 1, delay=60)
    with pytest.raises(WaitTimeout, match=r"0\.1 s"):
        Loader(faulty)(timeout=0.1)
    assert fault.fired


def test_what_an_older_checkpoint_lacks_must_not_stay_from_a_corrupt_newer_one(backend: MemoryBackend) -> None:
    """Half of step 20 is in place when its other half proves corrupt; step 10 has no `v`."""
    asyncio.run(stores.write_run(backend))
    w, v = stores.piece("w", weights(10)), stores.piece("v", torch.ones(40))
    asyncio.run(stores.write(backend, 10, [[w]]))
    attempt = asyncio.run(stores.write(backend, 20, [[v], [w]]))
    asyncio.run(stores.replace(backend, attempt.pack(1, "a", 0), stores.flip))
    loader = Loader(backend, {"w": torch.zeros(SHAPE), "v": torch.zeros(40)})
    with pytest.raises(LoadIncomplete, match="step 10 lacks v"):
        loader(strict=False)
    assert loader.touched
    fresh = Loader(backend, {"w": torch.zeros(SHAPE), "v": torch.zeros(40)})
    assert fresh(step=10, strict=False).missing == ["v"] and not fresh.state["v"].any()
    assert Loader(backend, {"w": torch.zeros(SHAPE)})(strict=False).step == 10


def test_a_value_that_cannot_be_decoded_falls_back(backend: MemoryBackend) -> None:
    filled(backend, (10,))
    nodes = [[stores.piece("w", weights(20)), stores.value("epoch", b"\xff not an encoding")]]
    asyncio.run(stores.write(backend, 20, nodes))
    loader = Loader(backend)
    assert loader().step == 10 and torch.equal(loader.state["w"], weights(10))


def test_slices_that_contradict_each_other_are_corruption(backend: MemoryBackend) -> None:
    asyncio.run(stores.write_run(backend))
    asyncio.run(stores.write(backend, 1, [[stores.piece("w", weights(1))], [stores.piece("w", weights(1).double())]]))
    with pytest.raises(CorruptCheckpoint, match="float64"):
        Loader(backend)(step=1)


def test_a_commit_that_names_a_part_of_another_is_refused(backend: MemoryBackend) -> None:
    old, new = filled(backend)
    asyncio.run(backend.delete(new.part(0)))
    stolen = backend._find(old.part(0))[0]
    asyncio.run(backend.put_if_absent(new.part(0), stolen))
    with pytest.raises(CorruptCheckpoint, match=str(new.part(0))):
        Loader(backend)(step=20)


def test_objects_of_no_slot_are_ignored(backend: MemoryBackend) -> None:
    filled(backend)
    asyncio.run(backend.put_if_absent(COMMITS / "notes.txt", b"hello"))
    asyncio.run(backend.put_if_absent(ObjectKey("commits/99.json"), b"hello"))
    assert Loader(backend)().step == 20
