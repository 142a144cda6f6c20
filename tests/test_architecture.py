"""The direction of imports: only to what stands before, and never in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "tightfit"

# From the facts a user gives to the command line. `tightfit` itself, the public names, stands
# before the command line only: nothing inside imports it.
ORDER = (
    "units",
    "errors",
    "facts",
    "policies",
    "bill",
    "gloo",
    "ledger",
    "engine",
    "dry_run",
    "planner",
    "monitor",
    "training",
    "report",
    "launch",
    "interop",
    "api",
    "tightfit",
    "cli",
)
FREE_OF_TORCH = ("facts", "policies", "bill", "units", "errors", "interop")


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def unit_of(name: str) -> str:
    """The part of the order that a module belongs to: `tightfit.facts.job` -> `facts`."""
    return name.split(".")[1] if "." in name else name


def imports_of(name: str) -> Iterator[str]:
    """The modules of tightfit that a module imports anywhere, in functions and for types too."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(name, node)
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "tightfit":
                yield target if target in MODULES else target.rpartition(".")[0] or target


def absolute_base(name: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    parts = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def test_there_are_modules_and_each_has_a_place_in_the_order() -> None:
    assert "tightfit.facts.job" in MODULES
    unknown = {unit_of(name) for name in MODULES} - set(ORDER) - {"__main__"}
    assert not unknown, f"give {unknown} a place in ORDER"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_only_what_stands_before(name: str) -> None:
    if unit_of(name) == "__main__":
        return
    place = ORDER.index(unit_of(name))
    wrong = [
        imported
        for imported in imports_of(name)
        if unit_of(imported) != unit_of(name) and ORDER.index(unit_of(imported)) > place
    ]
    assert not wrong, f"{name} imports {wrong}, which stand after {unit_of(name)!r}"


def test_no_cycles() -> None:
    graph = {name: {other for other in imports_of(name) if other != name} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_says_what_it_is_for(name: str) -> None:
    assert ast.get_docstring(TREES[name])


def test_light_modules_do_not_import_torch() -> None:
    light = [name for name in MODULES if unit_of(name) in FREE_OF_TORCH]
    light += [name for name in ("tightfit", "tightfit.cli.main") if name in MODULES]
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'peft'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
