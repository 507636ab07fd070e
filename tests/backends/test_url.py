"""URLs, and what importing the package costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import backends
from backends import InvalidURL, canonical_url, open_backend
from backends.local import LocalBackend


def test_paths_have_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    spellings = ("real", "real/", "./real", "link", "link/../real", f"{tmp_path}/real//", f"file://{tmp_path}/real/",
                 f"FILE://localhost{tmp_path}/link")  # fmt: skip
    assert {canonical_url(url) for url in spellings} == {f"file://{os.path.realpath(tmp_path)}/real"}


@pytest.mark.parametrize("name", ["a b", "100%", "%20", "é🙂", "a#b?c", os.fsdecode(b"\xff")])
def test_odd_paths_survive(tmp_path: Path, name: str) -> None:
    url = canonical_url(f"{tmp_path}/{name}")
    assert canonical_url(url) == url
    backend = open_backend(url)
    assert isinstance(backend, LocalBackend)
    assert backend.root == f"{os.path.realpath(tmp_path)}/{name}"
    assert not os.path.exists(backend.root)


def test_other_places() -> None:
    assert canonical_url("memory://name/") == "memory://name"
    assert canonical_url("S3://Bucket/Prefix/") == "s3://Bucket/Prefix"
    assert canonical_url("hdfs://NameNode:8020/Path/") == "hdfs://namenode:8020/Path"


@pytest.mark.parametrize("url", ["", "memory://", "s3:///", "file://host/path", "file://path", "a\0b", "file:///a%00b"])
def test_urls_that_name_no_place(url: str) -> None:
    with pytest.raises(InvalidURL):
        canonical_url(url)


def test_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(InvalidURL, match=r"gopher://.*file:///path.*memory://"):
        open_backend("gopher://host/path")


def test_every_public_name_is_there() -> None:
    for name in backends.__all__:
        assert getattr(backends, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = backends.nonsense


def test_importing_pulls_nothing_in() -> None:
    code = "import sys; before = {*sys.modules}; import backends; print(*{*sys.modules} - before)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"asyncio", "aiofiles", "dataclasses", "urllib.parse", "backends.local", "backends.testing"} & {*modules}


def test_testing_is_imported_by_tests_only() -> None:
    code = "import sys, backends.local, backends.memory, backends.sharedmem, backends.url; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"backends.testing", "torch", "numpy", "pytest"} & {*modules}
