"""The architecture document, enforced: who may import whom, and what nobody may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("backends", "ckptstore", "dataloader")

#: From the bottom up: a module may import from its own layer and from those below. The longest prefix counts.
LAYERS = [
    ["backends"],
    ["ckptstore.errors", "ckptstore._version"],
    ["ckptstore.format", "ckptstore.config", "ckptstore.loop"],
    ["ckptstore.repo", "ckptstore.group", "ckptstore.state"],
    ["ckptstore.agent", "ckptstore.agree", "ckptstore.preemption"],
    ["ckptstore.saving", "ckptstore.loading"],
    ["ckptstore.store"],
    ["ckptstore.adapters", "ckptstore", "dataloader"],
]
#: Layers whose members do not import each other.
APART = [("ckptstore.saving", "ckptstore.loading"), ("ckptstore.state", "ckptstore.repo"), ("ckptstore", "dataloader")]
WITHOUT_TORCH = ("backends", "ckptstore.agent", "ckptstore.format", "ckptstore.repo", "ckptstore.errors")
#: Modules that may unpickle: the loader's spawn module, an adapter's allow-list unpickler. Neither is there yet.
MAY_PICKLE: tuple[str, ...] = ()
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "all_gather_object", "broadcast_object_list"}
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def modules() -> dict[str, ast.Module]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


MODULES = modules()


def imports(name: str, tree: ast.Module, *, at_run_time: bool = False) -> set[str]:
    """Full names of the modules that this one imports; with `at_run_time` those for type checkers only left out."""
    package = (
        name if f"{name}.__init__" in MODULES or (ROOT / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]
    )
    skipped: set[ast.AST] = set()
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(inner for child in node.body for inner in ast.walk(child))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")
                anchor = anchor[: len(anchor) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            found.add(base)
            found.update(full for alias in node.names if (full := f"{base}.{alias.name}") in MODULES)
    return found


def layer(name: str) -> int | None:
    best, found = "", None
    for index, members in enumerate(LAYERS):
        for member in members:
            if (name == member or name.startswith(member + ".")) and len(member) > len(best):
                best, found = member, index
    return found


def belongs(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    mine = layer(name)
    for other in imports(name, MODULES[name], at_run_time=True):
        theirs = layer(other)
        if theirs is not None and mine is not None:
            own_root = other == "ckptstore" and belongs(name, "ckptstore")  # as in `from . import errors`
            assert own_root or theirs <= mine, f"{name} imports {other}, which lies above it"
        for one, two in APART:
            assert not (belongs(name, one) and belongs(other, two)), f"{name} imports {other}"
            assert not (belongs(name, two) and belongs(other, one)), f"{name} imports {other}"
    if belongs(name, "dataloader"):
        assert not any(belongs(other, "ckptstore") for other in imports(name, MODULES[name]))


@pytest.mark.parametrize("name", [name for name in MODULES if any(belongs(name, p) for p in WITHOUT_TORCH)])
def test_no_torch_where_the_agent_runs(name: str) -> None:
    assert not [other for other in imports(name, MODULES[name], at_run_time=True) if belongs(other, "torch")]


@pytest.mark.parametrize("name", MODULES)
def test_nothing_stored_can_run(name: str) -> None:
    tree = MODULES[name]
    if name not in MAY_PICKLE:
        assert not [other for other in imports(name, tree) if other.split(".")[0] in FORBIDDEN_IMPORTS]
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not [
        call for call in calls if call in FORBIDDEN_CALLS or call.split(".")[-1] in FORBIDDEN_CALLS - {"eval", "exec"}
    ]


def test_testing_modules_are_for_tests() -> None:
    for name, tree in MODULES.items():
        if not belongs(name, "backends.testing"):
            assert not [other for other in imports(name, tree) if belongs(other, "backends.testing")], name


def test_the_agent_starts_without_torch() -> None:
    """Nor with anything else that is slow to import before it must be there."""
    command = [sys.executable, "-X", "importtime", "-m", "ckptstore.agent", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "usage: ckptstore agent" in result.stdout
    loaded = {line.split("|")[-1].strip() for line in result.stderr.splitlines() if line.startswith("import time:")}
    assert "ckptstore.agent" in loaded
    assert not [name for name in loaded if name.split(".")[0] in ("torch", "numpy", "pydantic", "pyarrow")]
    serving = "import sys, ckptstore.agent.server; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", serving], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"torch", "pydantic"} & set(result.stdout.split())


def test_every_file_can_be_read_in_one_sitting() -> None:
    """Most files are under 300 lines; none is beyond 400."""
    lengths = {path: len(path.read_text().splitlines()) for p in PACKAGES for path in (ROOT / p).rglob("*.py")}
    assert not {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 400}


def test_public_names_resolve() -> None:
    import ckptstore

    for name in ckptstore.__all__:
        assert getattr(ckptstore, name) is not None
    tree = ast.parse((ROOT / "ckptstore" / "errors.py").read_text())
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    drawn = ast.get_docstring(tree) or ""
    assert all(name in drawn and hasattr(ckptstore, name) for name in classes)
