"""What people expect of the repository: two commands that hold, the usual files, nothing left behind."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (".ci", "benchmarks", "data", "docs", "notebooks", "recipes", "swiftkit", "tests")
ROOMS_AND_TESTS = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def texts() -> list[Path]:
    """Every text file that belongs to the repository, environments and runs left out."""
    inside = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    beside = [file for file in ROOT.iterdir() if file.is_file()]
    return sorted(
        file for file in inside + beside if "__pycache__" not in file.parts and b"\0" not in file.read_bytes()
    )


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def plain(requirement: str) -> str:
    """The normalised name of a requirement: `huggingface_hub>=1.5` is `huggingface-hub`."""
    return re.split(r"[ \[<>=!~;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.mark.parametrize(
    "name",
    [
        ".ci/run",
        ".gitignore",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "constraints-transformers-5.17.txt",
        "constraints.txt",
        "docs/architecture.md",
        "pyproject.toml",
    ],
)
def test_expected_file(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0


def test_ci_can_be_executed() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_readme_begins_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", readme, flags=re.DOTALL)
    commands = [line.split("#")[0].strip() for line in blocks[0].splitlines()]
    assert commands == ["make quickstart", "make test"]
    assert "\n## " not in readme[: readme.index(blocks[0])]


def test_make_knows_every_target_that_the_documents_name() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    for document in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        named = re.findall(
            r"(?:^|`|step )make ([a-z-]+)", (ROOT / document).read_text(encoding="utf-8"), flags=re.M
        )
        assert set(named) <= targets, document


def test_documents_link_to_files_that_exist() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{relative(document)} links to {link}"


def test_no_path_of_a_machine() -> None:
    """Nobody's home or scratch folder: such a path is right on one machine only."""
    machine = re.compile(r"(?<![\w.}~*])/(?:root|home|Users|work|opt|tmp)/\w")
    found = [
        f"{relative(file)}:{number}: {line.strip()}"
        for file in texts()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if machine.search(line)
    ]
    assert found == []


def test_every_file_can_be_read_in_one_sitting() -> None:
    lines = {relative(file): len(file.read_text(encoding="utf-8").splitlines()) for file in ROOMS_AND_TESTS}
    assert {name: count for name, count in lines.items() if count >= 500} == {}


def test_every_import_is_declared() -> None:
    """What swiftkit imports is a dependency or an extra: a fresh machine has nothing else."""
    facts = project()
    extras = facts["optional-dependencies"]
    optional = [line for name, lines in extras.items() if name != "dev" for line in lines]
    declared = {plain(line) for line in [*facts["dependencies"], *optional]}
    declared.add("triton")  # comes with torch, where torch is built for GPUs
    distributions = packages_distributions()
    missing = {}
    for file in (ROOT / "swiftkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"swiftkit"}:
                if not {plain(found) for found in distributions.get(name, [name])} & declared:
                    missing[name] = f"{relative(file)}:{node.lineno}"
    assert missing == {}


def test_constraints_pin_every_dependency() -> None:
    facts = project()
    pins = [
        line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    ]
    pinned = {plain(line) for line in pins}
    assert {
        plain(line) for line in [*facts["dependencies"], *facts["optional-dependencies"]["dev"]]
    } <= pinned
    assert len(pins) == len(pinned)
    assert not {name for name in pinned if name.startswith(("nvidia-", "cuda-", "triton"))}


@pytest.mark.slow
def test_wheel_carries_recipes_and_data(tmp_path: Path) -> None:
    """Built, installed beside nothing of this folder, and asked for what is inside."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True
    )
    (wheel,) = tmp_path.glob("swiftkit-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("recipes", "data"):
        files = [file for file in (ROOT / folder).rglob("*") if file.is_file()]
        assert files
        assert {
            f"swiftkit/_{folder}/{file.relative_to(ROOT / folder).as_posix()}" for file in files
        } <= inside

    target = tmp_path / "installed"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)], check=True)
    asked = (
        "import swiftkit, swiftkit.cli; from swiftkit.data.read import shipped;"
        "print(swiftkit.__file__, shipped('swiftkit::persona'), sep='\\n'); swiftkit.cli.main(['ls'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    package, persona, *names = run.stdout.splitlines()
    assert Path(package).is_relative_to(target)
    assert Path(persona).is_relative_to(target)
    assert "llama3-70b" in names
