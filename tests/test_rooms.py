"""The house: a room imports only from rooms below it, without circles, and the doors stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "swiftkit"

# From the doors down. Rooms of one floor may use each other, as long as there is no circle.
FLOORS = [
    {"__init__", "__main__", "api", "cli", "flags", "look", "migrate", "recipe_file"},
    {"methods"},
    {"export"},
    {"train"},
    {"quantize"},
    {"generate"},
    {"engine"},
    {"formats"},
    {"parallel"},
    {"data"},
    {"hub"},
    {"plan"},
    {"config", "errors", "registry", "support"},
]
FLOOR = {room: len(FLOORS) - number for number, rooms in enumerate(FLOORS) for room in rooms}

Edge = tuple[str, str, str]  # importing room, imported room, file:line


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Every file of the package with its room: the first name below the package."""
    for file in sorted(package.rglob("*.py")):
        yield file.relative_to(package).with_suffix("").parts[0], file


def imported(node: ast.AST, file: Path, package: Path) -> Iterator[str]:
    """The rooms that an import statement reaches."""
    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module.split(".") if node.module else []
        if node.level:
            inside = (package.name, *file.relative_to(package).parts)
            base = [*inside[: len(inside) - node.level], *base]
        names = [[*base, alias.name] for alias in node.names]
    else:
        return
    for name in names:
        if name[0] != package.name or name[1:] == ["__version__"]:
            continue
        room = name[1] if len(name) > 1 else "__init__"
        known = (package / room).is_dir() or (package / f"{room}.py").exists()
        yield room if known else "__init__"


def edges(package: Path) -> list[Edge]:
    """Every import between two rooms, also those inside functions and under TYPE_CHECKING."""
    found = []
    for room, file in modules(package):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), filename=str(file))):
            for target in imported(node, file, package):
                if target != room:
                    place = f"{file.relative_to(package.parent).as_posix()}:{node.lineno}"
                    found.append((room, target, place))
    return found


def upward(found: list[Edge]) -> list[str]:
    """The imports that do not go down, as sentences."""
    return [
        f"{place}: {room} imports {target}, which lies above it"
        for room, target, place in found
        if FLOOR[target] > FLOOR[room]
    ]


def circle(found: list[Edge]) -> list[str]:
    """The rooms of one circle, in order; empty where there is none."""
    below: dict[str, set[str]] = {}
    for room, target, _ in found:
        below.setdefault(room, set()).add(target)
    done: set[str] = set()

    def walk(room: str, path: list[str]) -> list[str]:
        if room in path:
            return [*path[path.index(room) :], room]
        if room in done:
            return []
        for target in sorted(below.get(room, ())):
            if ring := walk(target, [*path, room]):
                return ring
        done.add(room)
        return []

    return next((ring for room in sorted(below) if (ring := walk(room, []))), [])


def test_every_room_has_a_floor() -> None:
    assert {room for room, _ in modules(PACKAGE)} <= FLOOR.keys()


def test_nothing_imports_upwards() -> None:
    assert upward(edges(PACKAGE)) == []


def test_no_circles_between_rooms() -> None:
    assert circle(edges(PACKAGE)) == []


def test_the_check_sees_every_kind_of_import(tmp_path: Path) -> None:
    package = tmp_path / "swiftkit"
    for room in ("engine", "train"):
        (package / room).mkdir(parents=True)
        (package / room / "__init__.py").write_text("")
    (package / "cli.py").write_text("")
    (package / "__init__.py").write_text("__version__ = '0'\ndef sft(): ...\n")
    (package / "engine" / "lazy.py").write_text(
        "from swiftkit import __version__\n"
        "def late():\n    import swiftkit.train.loop\n"
        "def also():\n    from swiftkit import cli\n"
        "def door():\n    from swiftkit import sft\n"
        "def relative():\n    from ..train import loop\n"
        "def own():\n    from . import attention\n"
    )
    (package / "train" / "loop.py").write_text("import torch\nfrom swiftkit.engine import lazy\n")
    found = edges(package)
    assert [line.split()[0] for line in upward(found)] == [
        f"swiftkit/engine/lazy.py:{number}:" for number in (3, 5, 7, 9)
    ]
    assert circle(found) == ["engine", "train", "engine"]
    assert circle([("train", "engine", ""), ("engine", "data", ""), ("train", "data", "")]) == []


# Runs one command in a fresh interpreter and tells what it had imported by its end.
LIGHT = """
import json, sys
from swiftkit.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
heavy = sorted({"torch", "transformers", "datasets", "pandas", "matplotlib"} & set(sys.modules))
print(json.dumps({"code": code or 0, "heavy": heavy}))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["sft", "--help"], 0),
        (["dpo", "--help"], 0),
        (["reward", "--help"], 0),
        (["eval", "--help"], 0),
        (["eval", "--dataset", "no.jsonl"], 2),
        (["data", "--help"], 0),
        (["data", "preview", "--help"], 0),
        (["report", "--help"], 0),
        (["merge", "--help"], 0),
        (["doctor", "--help"], 0),
        (["launch", "--help"], 0),
        (["launch", "slurm"], 2),
        (["quantize", "--help"], 0),
        (["quantize", "smollm2-135m", "out", "--dataset", "x.jsonl", "--bits", "5"], 2),
        (["ls"], 0),
        (["show", "llama3-70b"], 0),
        (["sft", "--modle", "smollm2-135m"], 2),
        (["sft", "--model", "smollm2-135m", "--dataset", "x.jsonl", "--lora_rank", "many"], 2),
        (["trian"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_doors_import_nothing_heavy(arguments: list[str], code: int) -> None:
    run = subprocess.run([sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {"code": code, "heavy": []}
    if code == 2:
        assert len(run.stderr.strip().splitlines()) == 1, run.stderr
