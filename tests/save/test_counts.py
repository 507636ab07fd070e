"""Bytes written and owned, counted on real parallel models under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ranks


@pytest.mark.parametrize("kind", ["ddp", "hsdp", "fsdp_tp"])
def test_shared_state_is_written_once_and_shared_fairly(kind: str, tmp_path: Path, runtime_dir: Path) -> None:
    found = ranks.run("counts", 4, kind, tmp_path / "store", out=tmp_path / "out")
    first, second = found[0]["first"], found[0]["second"]
    unique = found[0]["unique"]
    packs = sum(pack.stat().st_size for pack in (tmp_path / "store" / "packs" / "000001" / "000001").iterdir())
    assert packs == first["bytes_written"]
    assert 0.98 * unique <= packs <= 1.02 * unique  # random weights: no chunk is like another but the zero biases
    assert first["bytes_state"] - unique < 0.01 * unique  # plain values
    for name, loads in _by_class(found).items():
        assert max(loads) - min(loads) <= 1 << 20, name
    assert second["bytes_written"] <= 0.12 * unique
    assert second["bytes_written"] + second["bytes_deduplicated"] == second["bytes_state"]
    assert [rank["collectives"] for rank in found] == [0, 0, 0, 0]


def _by_class(found: list[dict[str, dict[str, int]]]) -> dict[str, list[int]]:
    """Bytes that each rank of a set of replicas owns."""
    loads: dict[str, list[int]] = {}
    for rank in found:
        for holders, owned in rank["owned"].items():
            loads.setdefault(holders, []).append(owned)
    return loads


def test_the_grid_is_the_same_for_three_and_four_replicas(tmp_path: Path, runtime_dir: Path) -> None:
    grids = []
    for world in (4, 3):
        found = ranks.run("counts", world, "ddp", tmp_path / f"store{world}", out=tmp_path / f"out{world}")
        grids.append(sorted(chunk for rank in found for chunk in rank["grid"]))
    assert grids[0] == grids[1]
