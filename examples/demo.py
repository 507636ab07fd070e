"""Kill a training job twice, the second time with everything else on its node, and lose next to nothing.

    python examples/demo.py [--url URL]   # default: a fresh directory below build/demo; takes one to three minutes

Trains examples/train_gpt.py on 4 ranks (2 data-parallel x 2 tensor-parallel, gloo). While a checkpoint is being
uploaded it kills all ranks with SIGKILL; the store's agent, a process of its own, finishes the upload. Later it kills
the ranks and the agent together, as when a node loses its power. Each time the same command goes on by itself. Then
the same training runs uninterrupted: every loss must be bit-identical, or this exits with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RANKS, TP, STEPS, SAVE_EVERY = 4, 2, 30, 5
MODEL = ["--dim=384", "--layers=6", "--batch=2", "--context=64"]  # 11 M parameters, 130 MB with AdamW's moments
CRASHES = ((10, True), (20, False))  # from which step on, and whether the agent is spared
JOB_SECONDS, UPLOAD_SECONDS, END_SECONDS = 150, 10, 30  # deadlines
Line = dict[str, Any]


class Job:
    """One torchrun of the example, watched through the log that its rank 0 writes."""

    def __init__(self, url: str, log: Path, runtime_dir: Path) -> None:
        self.log, self.output, self.runtime_dir = log, log.with_suffix(".out"), runtime_dir
        self.read_to = log.stat().st_size if log.exists() else 0
        self.resumed: Line = {"resumed": 0, "load_seconds": 0.0}
        self.first_step_seconds: float | None = None  # from the start to the first step done
        script = str(Path(__file__).with_name("train_gpt.py"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", script]
        options = [f"--tp={TP}", f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--url={url}", f"--log-file={log}"]
        # A folder of our own keeps us apart from other agents of this user, and marks all we start: see processes().
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CKPTSTORE_RUNTIME_DIR": str(runtime_dir)}
        self.started = time.monotonic()
        with self.output.open("a") as file:
            self.torchrun = subprocess.Popen([*command, *options, *MODEL], env=environment, stdout=file, stderr=file)

    def lines(self) -> Iterator[Line]:
        """What it logs, as it comes, until it has ended. :raises RuntimeError: it failed or takes too long."""
        while True:
            status = self.torchrun.poll()
            for line in self._new_lines():
                if "resumed" in line:
                    self.resumed = line
                elif "step" in line and self.first_step_seconds is None:
                    self.first_step_seconds = time.monotonic() - self.started
                yield line
            if status == 0:
                return
            if status is not None or time.monotonic() > self.started + JOB_SECONDS:
                raise RuntimeError(f"training did not end well (status {status}):\n{self.output.read_text()[-3000:]}")
            time.sleep(0.002)

    def _new_lines(self) -> list[Line]:
        """Lines not seen yet; one that is not complete is left for the next time."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self.read_to)
            complete, newline, _ = file.read().rpartition(b"\n")
        self.read_to += len(complete) + len(newline)
        return [json.loads(line) for line in complete.splitlines()]


class Uploads:
    """Sees uploads come and go in a store on a local disk. Into a remote store it cannot look."""

    def __init__(self, url: str) -> None:
        self.directory = None if "://" in url else Path(url)
        self.before = 0  #: bytes that were there before the upload in question

    def bytes(self) -> int:
        """Of all checkpoints: of finished uploads and of those under way."""
        total = 0
        for file in self.directory.glob("packs/*/*/*") if self.directory else ():
            with contextlib.suppress(FileNotFoundError):  # renamed while we looked
                total += file.stat().st_size
        return total

    def ended(self, step: int) -> bool:
        return self.directory is not None and any(self.directory.glob(f"commits/{step:012d}.*"))

    def wait_begun(self, step: int) -> None:
        deadline = time.monotonic() + UPLOAD_SECONDS
        while self.directory and self.bytes() == self.before and not self.ended(step) and time.monotonic() < deadline:
            time.sleep(0.001)


@dataclass
class Crash:
    killed: str
    step: int  #: the newest step trained; its checkpoint was being uploaded
    under_way: bool | None  #: at the kill the upload had begun and was not committed; None: a remote store
    bytes_uploaded: int  #: of that checkpoint, at the kill


def processes(runtime_dir: Path) -> dict[int, str]:
    """Process id to command line of everything this demo started and that still runs."""
    found = {}
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked, or is somebody else's
            if process.name.isdecimal() and str(runtime_dir).encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    for path in runtime_dir.iterdir():  # an agent's environment may be closed to us: ask at its socket who serves it
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            if path.is_socket():
                connection.connect(str(path))
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                found[struct.unpack("3i", peer)[0]] = "ckptstore.agent"
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def train_until_crash(job: Job, at_step: int, spare_agent: bool, uploads: Uploads, progress: Progress) -> Crash:
    """Kill the job while the first checkpoint of `at_step` or later is being uploaded."""
    running: dict[int, str] = {}
    for line in job.lines():
        progress.update(progress.task_ids[-1], completed=line.get("step"))
        if not line.get("stall"):  # between saves
            uploads.before, running = uploads.bytes(), processes(job.runtime_dir)
        elif line["step"] >= at_step:
            uploads.wait_begun(line["step"])
            if not uploads.ended(line["step"]):
                break
    else:
        raise RuntimeError("no upload could be caught under way: each was done before we could look")
    ranks = [pid for pid, command in running.items() if "train_gpt" in command]  # and torchrun
    agent = [pid for pid in running if pid not in ranks]
    kill(ranks if spare_agent else ranks + agent)  # the ranks first: one that outlives the agent starts another
    under_way = None if uploads.directory is None else not uploads.ended(line["step"])
    uploaded = uploads.bytes() - uploads.before
    job.torchrun.wait()
    return Crash("all ranks" if spare_agent else "all ranks and the agent", line["step"], under_way, uploaded)


def train_to_end(job: Job, progress: Progress) -> None:
    for line in job.lines():
        progress.update(progress.task_ids[-1], completed=line.get("step"))


def run(url: str, directory: Path, runtime_dir: Path, console: Console) -> bool:
    """The whole demonstration; whether all went as it must."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    log, reference = directory / "killed.jsonl", directory / "uninterrupted.jsonl"
    crashes, jobs = [], [Job(f"{url}/killed", log, runtime_dir)]
    uploads = Uploads(f"{url}/killed")
    with Progress(*columns, console=console) as progress:
        progress.add_task("killed twice ", total=STEPS)
        for at_step, spare_agent in CRASHES:
            crash = train_until_crash(jobs[-1], at_step, spare_agent, uploads, progress)
            uploaded = megabytes(crash.bytes_uploaded)
            console.print(f"SIGKILL to {crash.killed} at step {crash.step}, {uploaded} of it uploaded", highlight=False)
            crashes.append(crash)
            jobs.append(Job(f"{url}/killed", log, runtime_dir))
        train_to_end(jobs[-1], progress)
        progress.add_task("uninterrupted", total=STEPS)
        train_to_end(Job(f"{url}/uninterrupted", reference, runtime_dir), progress)
    print_recoveries(console, crashes, jobs[1:])
    print_saves(console, [line for line in read_log(reference) if "saved" in line])
    left = wait_ended(runtime_dir)
    if left:
        console.print(f"[red]still running {END_SECONDS} s after the end:[/] {left}")
    if missed := [crash for crash in crashes if crash.under_way is False]:
        console.print(f"[red]the upload ended in the instant of the kill, so nothing is shown: run again[/] {missed}")
    return compare_losses(console, read_log(log), read_log(reference)) and not left and not missed


def read_log(log: Path) -> list[Line]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def wait_ended(runtime_dir: Path) -> dict[int, str]:
    """What still runs once everything has had time to end: nothing, if all is well."""
    deadline = time.monotonic() + END_SECONDS
    while (left := processes(runtime_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def compare_losses(console: Console, killed: list[Line], reference: list[Line]) -> bool:
    """Every loss of the killed training, of steps done twice too, against that of the uninterrupted one, bit by bit."""
    expected = {line["step"]: line["loss"] for line in reference if "step" in line}
    seen = [(line["step"], line["loss"]) for line in killed if "step" in line]
    wrong = [step for step, loss in seen if loss != expected[step]]
    complete = {step for step, _ in seen} == set(expected) == set(range(1, STEPS + 1))
    if wrong or not complete:
        console.print(f"[red]losses differ[/] at steps {wrong}" if wrong else "[red]steps are missing[/]")
        return False
    console.print(f"[green]All {len(seen)} losses are bit-identical[/] to those of the uninterrupted training.")
    return True


def print_recoveries(console: Console, crashes: list[Crash], jobs: list[Job]) -> None:
    seen = {True: "under way", False: "ended", None: "not visible from here"}
    rows: dict[str, list[str]] = {
        "killed at step": [str(crash.step) for crash in crashes],
        "upload of that step": [f"{seen[c.under_way]}, {megabytes(c.bytes_uploaded)} done" for c in crashes],
        "resumed at step": [str(job.resumed["resumed"]) for job in jobs],
        "work lost": [f"{c.step - job.resumed['resumed']} steps" for c, job in zip(crashes, jobs, strict=True)],
        "load": [milliseconds(job.resumed["load_seconds"]) for job in jobs],
        "torchrun to first step": [f"{job.first_step_seconds:.1f} s" for job in jobs],
    }
    table = Table("", *(f"SIGKILL to {crash.killed}" for crash in crashes), title=f"Recovery of {RANKS} ranks")
    for name, values in rows.items():
        table.add_row(name, *values)
    console.print(table)


def print_saves(console: Console, saves: list[Line]) -> None:
    table = Table("", "first save", "median of the others", title=f"Saving, {len(saves)} times, uninterrupted training")
    rows = {"stall": ("stall_seconds", milliseconds), "durable after": ("seconds_to_durable", milliseconds),
            "state": ("bytes_state", megabytes), "written": ("bytes_written", megabytes)}  # fmt: skip
    for name, (field, show) in rows.items():
        first, *others = (save[field] for save in saves)
        table.add_row(name, show(first), show(statistics.median(others)))
    console.print(table)


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=os.environ.get("CKPTSTORE_URL"), help="must hold no checkpoints yet")
    given = parser.parse_args()
    Path("build/demo").mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir="build/demo")).resolve()
    runtime_dir = Path(tempfile.mkdtemp(prefix="ckptstore-demo-"))
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        url = (given.url or str(directory)).rstrip("/")
        console.print(f"Checkpoints: {url}\nLogs: {directory}", soft_wrap=True, highlight=False)
        return 0 if run(url, directory, runtime_dir, console) else 1
    except RuntimeError as error:
        console.print(f"[red]{type(error).__name__}:[/] {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        kill(list(processes(runtime_dir)))
        shutil.rmtree(runtime_dir)


if __name__ == "__main__":
    sys.exit(main())
