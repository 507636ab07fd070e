"""Any mesh to any mesh, on real models: what one job saved, another shape of job loads bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ranks


@pytest.mark.parametrize(
    ("saved", "loads"),
    [
        ((4, "2x2"), [(1, "plain"), (2, "1x2"), (2, "2x1"), (8, "4x2")]),
        ((2, "ddp"), [(4, "2x2"), (3, "3x1")]),
        ((4, "hsdp"), [(2, "ddp"), (4, "1x4")]),
    ],
)
def test_saved_on_one_mesh_loaded_on_others(
    saved: tuple[int, str], loads: list[tuple[int, str]], tmp_path: Path, runtime_dir: Path
) -> None:
    world, kind = saved
    expected = ranks.run("reshard", world, "save", kind, tmp_path / "store", out=tmp_path / "saved")[0]
    for world, kind in loads:
        found = ranks.run("reshard", world, "load", kind, tmp_path / "store", out=tmp_path / f"{world}{kind}")
        assert all(rank == expected for rank in found), (world, kind)
