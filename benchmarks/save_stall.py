"""How long a save holds training up: ckptstore beside torch.save and torch's distributed checkpoints (DCP).

    python benchmarks/save_stall.py                     # 2 ranks, 512 MiB; about five minutes on two cores
    python benchmarks/save_stall.py --ranks 4 --size-mib 4096 --directory /mnt/nvme

Every contestant saves the same state, with the same ranks, to the same disk, and is done when its bytes are fsynced;
each has processes of its own, started by torchrun, so that none finds another's memory warm. The state is that of
AdamW in fp32, sharded over the ranks as DTensors, and changes between saves. A time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import nn
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import common
from benchmarks.contestants import Contestant, DcpAsyncSave, DcpSave, Ours, TorchSave, state_dicts

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
#: How DCP stages. The arguments are pinned memory, shared memory, staging in a thread, non-blocking copies.
STAGING: dict[str, tuple[AsyncCheckpointerType, StagingOptions | None]] = {
    "DCP async thread, as it comes": (THREAD, None),
    "DCP async thread, stager kept": (THREAD, StagingOptions(False, False, False, False)),
    "DCP async thread, kept, staging in thread": (THREAD, StagingOptions(False, False, True, False)),
    "DCP async thread, kept, pinned": (THREAD, StagingOptions(True, False, False, False)),
    "DCP async thread, StagingOptions()": (THREAD, StagingOptions()),
    "DCP async process, as it comes": (PROCESS, None),
    "DCP async process, stager kept": (PROCESS, StagingOptions(False, False, False, False)),
    "DCP async process, kept, shared": (PROCESS, StagingOptions(False, True, False, False)),
    "DCP async process, kept, shared, staging in thread": (PROCESS, StagingOptions(False, True, True, False)),
    "DCP async process, StagingOptions()": (PROCESS, StagingOptions()),
}
NAMES = ["torch.save", "DCP save", "DCP save, 2 threads, plans kept", *STAGING, "ckptstore"]


def build_contestant(name: str, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Contestant:
    if name == "ckptstore":
        return Ours(directory, model, optimizer)
    state = state_dicts(model, optimizer)
    if name in STAGING:
        return DcpAsyncSave(directory, state, *STAGING[name])
    if name.startswith("DCP save"):
        return DcpSave(directory, state, tuned=name != "DCP save")
    return TorchSave(directory, state)


@dataclass(frozen=True)
class Save:
    """One save, in seconds from its call, of the slowest rank."""

    call: float  #: until save() returned
    safe: float  #: until the state may be changed
    durable: float
    bytes_written: int  #: by all ranks


# ---- in each rank ----


@torch.no_grad()
def build_state(size_mib: int, small_tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of `size_mib` MiB over all ranks, AdamW's moments included, and about that many more tensors of 1 KiB."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shapes = [(1024, 1024)] * max(1, size_mib // 12) + [(256,)] * (small_tensors // 4)
    model = nn.ParameterList(nn.Parameter(zeros(*shape, device_mesh=mesh, placements=[Shard(0)])) for shape in shapes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        for tensor in (parameter, *moments.values()):
            to_local(tensor).normal_()
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return model, optimizer


def local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for values in optimizer.state.values() for value in values.values()]
    return [to_local(tensor) for tensor in [*model.parameters(), *moments]]


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def time_plain_copy(tensors: list[torch.Tensor]) -> float:
    """Seconds to copy this rank's bytes to host memory that was touched before: what a blocking save can't beat."""
    copies = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in tensors]
    times = []
    for _ in range(6):
        dist.barrier()
        began = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times += slowest(time.perf_counter() - began)
    return common.median(times[1:])


def slowest(*seconds: float) -> list[float]:
    """Of each figure the largest over the ranks."""
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]


def rank_main(args: argparse.Namespace) -> dict[str, Any]:
    """What this rank saw; as all times are the slowest rank's, all ranks return the same but for rounding."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    model, optimizer = build_state(args.size_mib, args.small_tensors)
    tensors = local_tensors(model, optimizer)
    copy = time_plain_copy(tensors)
    contestant = build_contestant(args.rank_of, args.directory, model, optimizer)
    saves = []
    for step in range(1, args.saves + 1):
        before = common.bytes_under(args.directory)
        if dist.get_rank() == 0:
            os.sync()  # so that no save waits for the bytes of one before
        dist.barrier()
        began = time.perf_counter()
        contestant.save(step)
        called = time.perf_counter() - began
        contestant.staged()
        safe = time.perf_counter() - began
        contestant.durable()
        called, safe, durable = slowest(called, safe, time.perf_counter() - began)
        saves.append(Save(called, safe, durable, common.bytes_under(args.directory) - before))
        torch._foreach_add_(tensors, 1e-3)
    contestant.close()
    dist.barrier()
    dist.destroy_process_group()
    return {"copy": copy, "saves": [asdict(save) for save in saves]}


# ---- in the driver ----


def run_contestant(name: str, small_tensors: int, args: argparse.Namespace) -> dict[str, Any]:
    """What the ranks reported: {"copy": seconds, "saves": [Save, ...]}, or {"error": text} if any of them failed."""
    directory = Path(tempfile.mkdtemp(prefix="save_stall.", dir=args.directory))
    report = directory.with_suffix(".json")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), __file__]
    options = {
        "rank-of": name, "directory": directory, "report": report,
        "size-mib": args.size_mib, "small-tensors": small_tensors, "saves": args.saves,
    }  # fmt: skip
    threads = str(max(1, len(os.sched_getaffinity(0)) // args.ranks))
    job = subprocess.Popen(
        [sys.executable, *ranks, *(f"--{key}={value}" for key, value in options.items())],
        env={**os.environ, "OMP_NUM_THREADS": threads}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, errors = job.communicate(timeout=args.timeout)
        reported = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        reported.sort(key=lambda line: "error" not in line)
        return reported[0] if reported else {"error": errors[-1000:]}
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {args.timeout} s"}
    finally:
        if job.poll() is None:
            kill_tree(job.pid)
            job.wait()
        shutil.rmtree(directory)
        report.unlink(missing_ok=True)


def run_round(names: list[str], small_tensors: int, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Every contestant once, by name."""
    task = progress.add_task("", total=len(names))
    results = {}
    for name in names:
        progress.update(task, description=f"{name}, {small_tensors} small tensors")
        time.sleep(args.pause)
        began = time.monotonic()
        results[name] = result = run_contestant(name, small_tensors, args)
        outcome = result.get("error", "").partition("\n")[0] or f"stall {common.milli(later(result, 'safe'))} ms"
        progress.console.print(f"{name}: {outcome} ({time.monotonic() - began:.0f} s)", highlight=False, markup=False)
        progress.advance(task)
    return results


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and all below it: torchrun gives each rank a session of its own, so a group won't do."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        kill_tree(int(child))
    os.kill(pid, signal.SIGKILL)


def later(result: dict[str, Any], field: str) -> float:
    """The median from the second save on."""
    return common.median([save[field] for save in result["saves"][1:]])


def best_of_dcp(results: dict[str, Any]) -> str | None:
    """The DCP contestant with the shortest stall, or None if none worked."""
    rivals = [name for name, result in results.items() if name.startswith("DCP") and "saves" in result]
    return min(rivals, key=lambda name: later(results[name], "safe"), default=None)


def names_for_small_tensors(results: dict[str, Any]) -> list[str]:
    """The second round: ours, the best of DCP, and two that always work."""
    again = {"torch.save", "DCP async thread, stager kept", best_of_dcp(results), "ckptstore"}
    return [name for name in results if name in again]


def report(results: dict[str, Any], small: dict[str, Any], args: argparse.Namespace) -> None:
    good = {name: result for name, result in results.items() if "saves" in result}
    copy = common.median([result["copy"] for result in good.values()])
    best = best_of_dcp(results)
    best_stall = later(results[best], "safe") if best else None
    rows = []
    for name, result in good.items():
        safe = later(result, "safe")
        rows.append([
            name, common.milli(result["saves"][0]["safe"]), common.milli(later(result, "call")), common.milli(safe),
            f"{later(result, 'durable'):.2f}", f"{later(result, 'bytes_written') / 2**20:.0f}",
            f"{safe / result['copy']:.1f}", f"{safe / best_stall:.2f}" if best_stall else "",
            common.milli(later(small[name], "safe") - safe) if "saves" in small.get(name, {}) else "",
        ])  # fmt: skip
    columns = ["", "first stall, ms", "call, ms", "stall, ms", "durable, s", "written, MiB", "÷ copy", "÷ best DCP",
               f"+{args.small_tensors} tensors, ms"]  # fmt: skip
    note = f"{args.ranks} ranks, {args.size_mib} MiB. Stall: until the state may be changed; call: until save() "
    note += f"returned. Medians from the second save on. A plain copy took {common.milli(copy)} ms. Best DCP: {best}."
    common.print_table("Save stall", columns, rows, note)
    failures = {name: result["error"] for name, result in [*results.items(), *small.items()] if "error" in result}
    if failures:
        common.print_table("Failed", ["", "exception"], [[name, text] for name, text in failures.items()])
    settings = {key: value for key, value in vars(args).items() if isinstance(value, int)}
    machine = common.describe_machine(args.directory)
    common.write_json(args.out / "save_stall.json", machine, settings=settings, copy_seconds=copy, best_dcp=best,
                      results=results, with_small_tensors=small)  # fmt: skip
    bars = {name: {"stall": later(r, "safe"), "durable": later(r, "durable")} for name, r in good.items()}
    title = f"Saving {args.size_mib} MiB from {args.ranks} ranks ({machine['cpu']}, {machine['filesystem']})"
    common.plot_bars(args.out / "save_stall.png", title, "seconds", bars)
    print(f"Written to {args.out}/save_stall.json and .png")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size-mib", type=int, default=512, help="of state, over all ranks")
    parser.add_argument("--small-tensors", type=int, default=10_000, help="added in a second round; 0 leaves it out")
    parser.add_argument("--saves", type=int, default=4, help="per contestant, at least 2")
    parser.add_argument("--only", default="", help="contestants whose name contains this")
    parser.add_argument("--directory", type=Path, default=Path("build/benchmarks"), help="on the disk to save to")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="directory for the JSON and the plot")
    parser.add_argument("--timeout", type=int, default=60, help="seconds, per contestant")
    parser.add_argument(
        "--pause",
        type=int,
        default=10,
        help="seconds before each contestant: disks have bursts, which must not go to the first",
    )
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.rank_of:
        with args.report.open("a") as report_file:  # opened now: a contestant may use all descriptors up
            try:
                print(json.dumps(rank_main(args)), file=report_file)
            except Exception as error:
                print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=report_file)
                raise
        return
    args.directory.mkdir(parents=True, exist_ok=True)
    names = [name for name in NAMES if args.only in name]
    with Progress() as progress:
        results = run_round(names, 0, args, progress)
        small = {}
        if args.small_tensors:
            small = run_round(names_for_small_tensors(results), args.small_tensors, args, progress)
    report(results, small, args)


if __name__ == "__main__":
    main()
