"""What every benchmark here shares: describing the machine, tables, JSON, plots."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def describe_machine(directory: Path) -> dict[str, Any]:
    """The machine a figure was measured on, with the file system of `directory`: all JSON."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": gpus,
        "filesystem": filesystem_of(directory),
    }


def filesystem_of(directory: Path) -> str:
    """The type of the file system that holds an existing directory, e.g. ext4."""
    resolved = directory.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(mount, kind) for mount, kind in mounts if resolved.is_relative_to(mount)]
    return max(holding, key=lambda found: len(found[0]))[1]


def _first_value(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return platform.machine()


def bytes_under(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def milli(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """The first column to the left, the others to the right; a wide terminal is assumed where there is none."""
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=None if console.is_terminal else 150).print(table)


def write_json(path: Path, machine: Mapping[str, Any], **results: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")


def plot_bars(path: Path, title: str, axis: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """A PNG of horizontal bars: groups is {name on the axis: {series: value}}, every name with the same series."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, series = list(groups), list(next(iter(groups.values())))
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.5 * len(names)), layout="constrained")
    thickness = 0.8 / len(series)
    for i, label in enumerate(series):
        places = [row - (i - (len(series) - 1) / 2) * thickness for row in range(len(names) - 1, -1, -1)]
        bars = axes.barh(places, [groups[name][label] for name in names], thickness, label=label)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set_yticks(range(len(names) - 1, -1, -1), names)
    axes.set_xlabel(axis)
    axes.set_title(title, loc="left")
    axes.margins(x=0.1)
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
