"""The contract of the house: which package may import which, counting lazy and type-only imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {"placement": 0, "actors": 1, "cluster": 2, "serve_app": 3}
FORBIDDEN = {
    "placement": {"torch", "ray", "zmq", "fastapi", "transformers"},
    "actors/engine": {"torch", "ray", "fastapi", "transformers"},
    "actors/model": {"ray", "zmq", "fastapi", "transformers"},
    "actors": {"ray", "fastapi", "starlette", "transformers"},
    "cluster": {"fastapi", "starlette", "typer", "transformers"},
    "serve_app": {"transformers"},
}
FILES = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node.lineno


def test_imports_go_one_way() -> None:
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in FILES
        for module, line in imports(path)
        if FLOORS.get(module.split(".")[0], -1) > FLOORS[path.relative_to(ROOT).parts[0]]
    ]
    assert upward == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_each_package_keeps_to_its_libraries(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in FILES
        if path.relative_to(ROOT).as_posix().startswith(f"{package}/")
        for module, line in imports(path)
        if module.split(".")[0] in FORBIDDEN[package]
    ]
    assert found == []


@pytest.mark.parametrize("package", ["placement", "actors/engine"])
def test_pure_packages_load_neither_torch_nor_ray(package: str) -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in FILES
        if path.relative_to(ROOT).as_posix().startswith(f"{package}/") and path.name != "__init__.py"
    ]
    load = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\n"
    code = load + "print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_line_starts_without_torch_or_ray() -> None:
    code = "import sys\nimport serve_app.commands.cli\nprint([m for m in ('torch', 'ray', 'fastapi') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_ray_decorators_stand_only_where_things_are_created() -> None:
    """Plain classes everywhere: `ray.remote` and `serve.deployment` appear in the composition roots only."""
    roots = {"cluster/replica/launch.py", "cluster/nodes/measure.py", "serve_app/app.py"}
    found = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for word in ("ray.remote", "serve.deployment(")
        if word in path.read_text() and path.relative_to(ROOT).as_posix() not in roots
    }
    assert found == set()
