"""Runs a worker under torchrun on gloo, as a job would, and collects what its ranks found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers"


def start(worker: str, ranks: int, *arguments: object, out: Path, **environment: str) -> subprocess.Popen[str]:
    """Start ``tests/workers/<worker>.py`` on so many ranks. Each rank may write a file to ``out`` (see `report`)."""
    out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--no-python",
        f"--nproc-per-node={ranks}",
    ]
    command += [sys.executable, str(WORKERS / f"{worker}.py"), *map(str, arguments)]
    root = str(Path(__file__).parent.parent)
    settings = {"OMP_NUM_THREADS": "1", "TEST_OUT": str(out), "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        env={**os.environ, **settings, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(worker: str, ranks: int, *arguments: object, out: Path, timeout: float = 90, **environment: str) -> list[Any]:
    """Run a worker to its end; what each rank reported, in order of ranks."""
    process = start(worker, ranks, *arguments, out=out, **environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        raise AssertionError(f"{worker} {arguments} hung:\n{output[-8000:]}") from None
    assert process.returncode == 0, f"{worker} {arguments}:\n{output[-8000:]}"
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL torchrun and every rank."""
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    process.kill()


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that still run."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def report(found: object) -> None:
    """Called by a rank: what it found, for the test."""
    target = Path(os.environ["TEST_OUT"]) / f"{os.environ['RANK']}.json"
    fresh = target.with_suffix(".fresh")
    fresh.write_text(json.dumps(found))
    fresh.rename(target)
