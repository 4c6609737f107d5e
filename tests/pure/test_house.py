"""The contract of the house: who may import whom (lazy and type-only imports count), and the words it is written in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pure.house import ALLOWED, BANNED_WORDS, FORBIDDEN, MOST_FILES, PACKAGES, ROOMS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
ORDER = {
    f"{package}/{folder}".removesuffix("/"): place
    for place, (package, folder) in enumerate((package, folder) for package, folders in ROOMS.items() for folder in folders)
}
"""Place of every folder in the order of imports."""
SENTENCES = {
    f"{package}/{folder}".removesuffix("/"): line for package, rooms in ROOMS.items() for folder, line in rooms.items()
}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module a file imports, wherever in the file, and the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module or "", node.lineno


def own_imports(path: Path) -> Iterator[tuple[Path, int]]:
    """Files of the four packages that a file imports, and the line."""
    yield from ((MODULES[module], line) for module, line in imports(path) if module in MODULES)


def test_every_folder_is_in_the_order_and_says_what_it_is() -> None:
    folders = {named(path.parent) for path in FILES if path.name != "__init__.py"}
    assert folders == set(ORDER)
    for folder, sentence in {**SENTENCES, **PACKAGES}.items():
        if folder != "serve_app" or sentence == PACKAGES["serve_app"]:
            text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
            assert text.splitlines()[:1] == [sentence], f"{folder}/__init__.py does not begin with: {sentence}"


def test_the_readme_lists_every_folder() -> None:
    text = (ROOT / "README.md").read_text()
    assert [sentence for sentence in (*SENTENCES.values(), *PACKAGES.values()) if sentence not in text] == []


def test_folders_import_only_folders_before_them() -> None:
    wrong = [
        f"{named(path)}:{line} imports {named(target)}"
        for path in FILES
        for target, line in own_imports(path)
        if path.name != "__init__.py"
        and target.name != "__init__.py"
        and ORDER[named(target.parent)] > ORDER[named(path.parent)]
    ]
    assert wrong == []


def test_no_circle_of_files() -> None:
    graph: dict[Path, set[Path]] = defaultdict(set)
    for path in FILES:
        graph[path] |= {target for target, _ in own_imports(path)}
    while leaves := [path for path in graph if not graph[path] & graph.keys()]:
        for path in leaves:
            del graph[path]
    assert sorted(map(named, graph)) == [], "these files import each other in a circle, or import such files"


def test_folders_are_small_enough_to_read() -> None:
    crowded = {named(folder): count for folder, count in Counter(p.parent for p in FILES).items() if count - 1 > MOST_FILES}
    assert crowded == {}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_each_folder_keeps_to_its_libraries(package: str) -> None:
    found = [
        f"{named(path)}:{line} imports {module}"
        for path in FILES
        if named(path).startswith(f"{package}/")
        for module, line in imports(path)
        if module.split(".")[0] in FORBIDDEN[package]
    ]
    assert found == []


@pytest.mark.parametrize("package", ["placement", "actors/engine", "actors/wire"])
def test_pure_packages_load_neither_torch_nor_ray(package: str) -> None:
    modules = [module for module, path in MODULES.items() if named(path).startswith(f"{package}/")]
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
        named(path)
        for path in FILES
        for word in ("ray.remote", "serve.deployment(")
        if word in path.read_text() and named(path) not in roots
    }
    assert found == set()


def test_a_class_name_belongs_to_one_class() -> None:
    """Aliases of types count too, but for private ones."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                where[node.name].append(named(path))
            elif isinstance(node, ast.Assign) and re.match(r"[A-Z][a-z]", ast.unparse(node.targets[0])):
                where[ast.unparse(node.targets[0])].append(named(path))
    twice = {name: files for name, files in where.items() if len(files) > 1 and not name.startswith("_")}
    assert twice == {}


@pytest.mark.parametrize("word", BANNED_WORDS)
def test_things_have_the_name_that_the_field_gives_them(word: str) -> None:
    """No identifier, file or text of the packages has a word for which the field has another."""
    whole = re.compile(rf"(?<![a-zA-Z]){word}(?![a-zA-Z])|(?<![A-Z]){word.title().replace('_', '')}(?![a-z])")
    found = [
        f"{named(path)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate([named(path), *path.read_text().splitlines()])
        if whole.search(line) and ALLOWED.get(named(path)) != word
    ]
    assert found == []


SUBJECTLESS = re.compile(r"(Of|That|Those|In which|Where|What|Which|With|As) ")


def test_docstrings_are_sentences_with_a_subject() -> None:
    """A docstring that begins with "Of" or "That of" is a riddle to whoever has not read the code."""
    found = [
        f"{named(path)}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and SUBJECTLESS.match(text := ast.get_docstring(node) or "")
    ]
    assert found == []
