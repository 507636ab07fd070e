"""Replicas are proved by content; what is not one is named, or kept for each rank where it is marked."""

from __future__ import annotations

from pathlib import Path

from tests import ranks


def test_replicas_are_proved_and_marks_are_kept(tmp_path: Path, runtime_dir: Path) -> None:
    both = ranks.run("replicas", 2, tmp_path, out=tmp_path / "out")
    for rank, found in enumerate(both):
        assert found["tensor"].startswith("ReplicaMismatch: 'inner/expert' has different content on ranks [0] and [1]")
        assert "PerRank" in found["tensor"]
        assert found["value"].startswith("ReplicaMismatch: 'epoch'")
        assert found["shape"].startswith("StateError: 'x' is not one tensor")
        assert found["only one rank fails"].startswith("UnsupportedValue")
        assert found["nothing"] == []
        assert found["after"] == [1]
        assert found["rng"]
        assert found["mine"] == [float(rank), {"n": rank}, 0, float(rank)]
        assert found["later small"].startswith("ReplicaMismatch: 'small'")
        assert found["later big"].startswith("ReplicaMismatch: 'big'")
        assert found["later value"].startswith("ReplicaMismatch: 'seed'")
        assert found["later well"] == "none"
        assert found["later steps"] == [1, 5]
        assert found["buffer"] == 5.0
        assert found["step"].startswith("ConfigError: ranks differ")
        assert found["later step"].startswith("SaveFailed")
        assert "differ in" in found["later step"]
        assert found["and on"] == "none"
