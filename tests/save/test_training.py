"""Saving never changes training; SIGTERM on one rank is the same answer on all."""

from __future__ import annotations

from pathlib import Path

from tests import ranks


def test_training_is_the_same_with_saves_and_without(tmp_path: Path, runtime_dir: Path) -> None:
    for found in ranks.run("training", 2, tmp_path / "store", out=tmp_path / "out"):
        assert found["with"] == found["without"]
        assert found["steps"] == list(range(7))
        assert found["preempted"] == [False] * 3 + [True] * 3
