"""Storage that is damaged after the save, and storage that is full, from end to end."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ckptstore import CheckpointStore, CorruptCheckpoint, StorageFull
from ckptstore.format.commit import Commit
from tests.save import processes
from tests.save.job import committed, intents, slot, temporary

MIB = 1 << 20


def tensor(step: int, size: int = MIB) -> torch.Tensor:
    """So many bytes that belong to this step alone."""
    return torch.randint(-128, 127, (size,), dtype=torch.int8, generator=torch.Generator().manual_seed(step))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with steps 1 and 2."""
    store = tmp_path_factory.mktemp("two") / "store"
    with processes.private_runtime() as runtime, CheckpointStore(str(store), runtime_dir=runtime) as saver:
        for step in (1, 2):
            saver.save(step, {"a": tensor(step), "step": step}).wait(30)
    return store


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


CASES: list[tuple[str, Callable[..., None]]]
CASES = [(what, damage) for what in ("pack", "part", "commit") for damage in (truncate, flip)]
CASES += [(what, os.unlink) for what in ("pack", "part")]  # without its commit there is no checkpoint


@pytest.mark.parametrize(("what", "damage"), CASES)
def test_damage_is_named_and_the_step_before_is_loaded(
    what: str,
    damage: Callable[..., None],
    two_steps: Path,
    tmp_path: Path,
    runtime: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = shutil.copytree(two_steps, tmp_path / "store")
    found = slot(root, 2)
    assert isinstance(found, Commit)
    pack = next((root / "packs/000001/000002").iterdir())
    victim = {"pack": pack, "part": root / str(found.parts[0].key), "commit": root / str(found.slot.key)}[what]
    name = str(victim.relative_to(root))
    damage(victim)
    into = torch.zeros(MIB, dtype=torch.int8)
    with CheckpointStore(str(root), runtime_dir=runtime) as store, caplog.at_level(logging.WARNING, "ckptstore"):
        with pytest.raises(CorruptCheckpoint, match=name):
            store.load({"a": into, "step": 0}, step=2)
        report = store.load({"a": into, "step": 0})
    assert report.step == 1 and torch.equal(into, tensor(1)) and report.values == {"step": 1}
    ((step, reason),) = report.fallbacks
    assert step == 2 and name in reason
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("step 2" in line and "falling back to step 1" in line and name in line for line in said), said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount the file system of limited size that this test needs")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "ckptstore-test", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system of limited size cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path, runtime: Path) -> None:
    root, ballast = small_disk / "store", small_disk / "ballast"
    with CheckpointStore(str(root), runtime_dir=runtime) as store:
        ballast.write_bytes(bytes(4 * MIB))
        store.save(1, {"a": tensor(1, 2 * MIB)}).wait(30)
        failed = store.save(2, {"a": tensor(2, 4 * MIB)})
        with pytest.raises(StorageFull, match="free space"):
            failed.wait(30)
        assert store.steps() == [1]
        assert not (root / "packs/000001/000002").exists() and not temporary(root) and not intents(root)
        ballast.unlink()
        store.save(2, {"a": tensor(2, 2 * MIB)}).wait(30)
        store.save(3, {"a": tensor(3, MIB)}).wait(30)
        assert store.steps() == [1, 2, 3]
        for step, size in ((1, 2), (2, 2), (3, 1)):
            into = {"a": torch.zeros(size * MIB, dtype=torch.int8)}
            assert store.load(into, step=step).step == step and torch.equal(into["a"], tensor(step, size * MIB))


def test_a_disk_that_fills_up_at_every_point_of_a_save(small_disk: Path, runtime: Path) -> None:
    """With each page more that is free, the save gets a bit further: to the pack, the part, the commit, the end."""
    root, ballast, page = small_disk / "store", small_disk / "ballast", os.sysconf("SC_PAGE_SIZE")
    size = 16 * page
    failures = 0
    with CheckpointStore(str(root), runtime_dir=runtime) as store:
        store.save(0, {"a": tensor(0, size)}).wait(30)
        for step in range(1, 40):
            free = os.statvfs(small_disk).f_bavail * page
            ballast.write_bytes(bytes(free - (step - 1) * page))
            error = store.save(step, {"a": tensor(step, size)}).exception(30)
            assert committed(root, step) == (error is None)
            if error is None:
                break
            assert isinstance(error, StorageFull), repr(error)
            attempt = f"000001/{step + 1:06d}"
            assert not (root / "packs" / attempt).exists() and not (root / "parts" / attempt).exists()
            assert not temporary(root)
            failures += 1
            ballast.unlink()
        assert failures > 16 and store.steps() == [0, step]
        into = {"a": torch.zeros(size, dtype=torch.int8)}
        assert store.load(into).step == step and torch.equal(into["a"], tensor(step, size))
