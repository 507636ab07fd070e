"""A failure on one rank is that save's failure on all ranks, and no later save's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ranks


def test_one_rank_fails_and_training_goes_on(tmp_path: Path, runtime_dir: Path) -> None:
    both = ranks.run("desync", 2, tmp_path, out=tmp_path / "out")
    for rank, found in enumerate(both):
        assert found["first"] == "durable"
        assert found["unsupported"].startswith("UnsupportedValue" if rank else "SaveFailed: rank 1: UnsupportedValue")
        assert found["after unsupported"] == "durable"
        assert found["metrics"].startswith("SaveFailed: rank 0: ConfigError" if rank else "ConfigError: metrics")
        assert found["again"] == "durable"
        lost, anew = found["structure"][:2], found["structure"][2:]
        assert all(text.startswith("StructureChanged") and "on rank 1" in text for text in lost)
        assert anew == ["durable", "durable"]
        assert found["all change"] == "durable"
        assert found["steps"] == [1, 3, 4, 7, 8, 9]
        assert found["raised"] == [[4, "ReplicaMismatch"]]
        assert found["raise steps"] == [1, 3, 5, 6, 7, 8]
        assert found["all there"] == "durable"
        assert found["settings"].startswith("ConfigError: ranks 0 and 1 differ in their settings")
        assert found["memory"].startswith("ConfigError: memory://x lives in one process")
    assert both[0]["missing"].startswith("WaitTimeout: save for the first time: ranks [1] did not come within 1 s")
    assert both[1]["missing rank 0"].startswith("WaitTimeout: save for the first time: rank 0 did not come within 1 s")


ORDERS = ["save wait load", "load save wait", "CheckpointStore save wait load", "load CheckpointStore save wait"]


@pytest.mark.parametrize("order", ORDERS)
def test_the_functions_of_the_process_s_store(order: str, tmp_path: Path, runtime_dir: Path) -> None:
    """In whatever order they are used; and at the end of the process nothing is left."""
    script = """
import sys, torch, ckptstore
x = torch.ones(4)
for name in sys.argv[1:]:
    if name == "save":
        ckptstore.save(1, {"x": x})
    elif name == "wait":
        ckptstore.wait()
    elif name == "load":
        print(ckptstore.load({"x": x}).step)
    else:
        ckptstore.CheckpointStore()
"""
    environment = {**os.environ, "CKPTSTORE_URL": str(tmp_path / "store")}
    done = subprocess.run(
        [sys.executable, "-c", script, *order.split()], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [("None" if order.startswith("load") else "1")]
