"""A job whose ranks do what the test tells them, one command at a time: what runs under torchrun, without torchrun.

So a test can kill one rank, or the agent, at the very point it wants, and the other ranks go on.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from backends.key import ObjectKey
from ckptstore.format import commit, document
from ckptstore.format.commit import Aborted, Commit
from ckptstore.format.keys import parse_slot
from tests.ranks import WORKERS
from tests.save import processes

_PATIENCE = 60.0  # seconds for one answer


class Job:
    """So many ranks that save to ``folder/store``; see tests/workers/driven.py for what they can be told."""

    def __init__(self, ranks: int, folder: Path, runtime: Path, **settings: object) -> None:
        self.folder, self.runtime, self.store = folder, runtime, folder / "store"
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        environment |= {"CKPTSTORE_URL": str(self.store), "CKPTSTORE_RUNTIME_DIR": str(runtime)}
        environment |= {f"CKPTSTORE_{name.upper()}": str(value) for name, value in settings.items()}
        meeting = folder / f"meeting-{time.monotonic_ns()}"
        self.processes = []
        for rank in range(ranks):
            command = [sys.executable, str(WORKERS / "driven.py"), str(rank), str(ranks), str(meeting)]
            with (folder / f"{rank}.err").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
                    )
                )
        self.living = list(range(ranks))
        self._step = 0

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.living:
            self.all("close")
        self.kill(*self.living)

    def all(self, command: str, *arguments: object) -> list[Any]:
        """Tell all living ranks, and return what they answer."""
        for rank in self.living:
            self.tell(rank, command, *arguments)
        return [self.hear(rank) for rank in self.living]

    def save(self, step: int) -> int:
        """Have all ranks save, which none may refuse; the agent's process id."""
        answers = self.all("save", step)
        assert all(isinstance(answer, int) for answer in answers), answers
        return int(answers[0])

    def ask(self, rank: int, command: str, *arguments: object) -> Any:
        self.tell(rank, command, *arguments)
        return self.hear(rank)

    def tell(self, rank: int, command: str, *arguments: object) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps([command, *arguments]).encode() + b"\n")

    def hear(self, rank: int) -> Any:
        """The rank's answer to what it was told first; what it raised, as ``{"error": class, "message": text}``."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], _PATIENCE)
        line = stdout.readline() if ready else b""
        assert line, (
            f"rank {rank} {'ended' if ready else 'hangs'}:\n{(self.folder / f'{rank}.err').read_text()[-6000:]}"
        )
        return json.loads(line)

    def kill(self, *ranks: int) -> None:
        """SIGKILL these ranks, or all that live."""
        for rank in ranks or self.living:
            self.processes[rank].kill()
        for rank in ranks or list(self.living):
            self.processes[rank].wait()
            for pipe in (self.processes[rank].stdin, self.processes[rank].stdout):
                assert pipe is not None
                pipe.close()
        self.living = [rank for rank in self.living if self.processes[rank].returncode is None]

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def new_step(self) -> int:
        self._step += 1
        return self._step

    @property
    def agent(self) -> int:
        """The one agent that serves this job."""
        return processes.the_agent(self.runtime)


def slot(store: Path, step: int) -> Commit | Aborted | None:
    """What the newest slot of this step holds."""
    found: Commit | Aborted | None = None
    for file in sorted((store / "commits").glob(f"{step:012d}.*.json")):
        where = parse_slot(ObjectKey(f"commits/{file.name}"))
        assert where is not None
        found = commit.decode(file.read_bytes(), where)
    return found


def committed(store: Path, step: int) -> bool:
    return isinstance(slot(store, step), Commit)


def intents(store: Path) -> list[document.Body]:
    return [document.decode(file.read_bytes(), file, "intent") for file in sorted((store / "intents").glob("*.json"))]


def temporary(store: Path) -> list[str]:
    """The temporary objects under packs/, as keys."""
    return sorted(str(file.relative_to(store)) for file in (store / "packs").rglob("*.tmp"))
