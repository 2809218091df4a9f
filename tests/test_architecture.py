"""The shape of the code base: what may import what, what a command loads, how long files and functions may get."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dilabench"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = {path: path.read_text() for path in MODULES}

HEAVY = ("attention.py", "testing.py", "contracts.py", "impls", "backends", "kernels", "distributed", "engine")
HEAVY_PACKAGES = {"torch", "triton", "flash_attn", "flash_attn_interface", "xformers"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base"}
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60


def top(path: Path) -> str:
    """The first part of a module's path below the package: 'bench' or 'spec.py'."""
    return path.relative_to(PACKAGE).parts[0]


def dotted(path: Path) -> str:
    """The import name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


LIGHT = [path for path in MODULES if top(path) not in HEAVY and path.name != "__main__.py"]


def module_level_imports(tree: ast.Module) -> set[str]:
    """Top-level packages that importing the module imports, `if TYPE_CHECKING` aside."""
    found: set[str] = set()
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            pending += [child for child in ast.walk(node) if isinstance(child, ast.Import | ast.ImportFrom)]
    return found


def loaded_after(code: str) -> set[str]:
    """Top-level packages in sys.modules after running `code` in a fresh process."""
    script = f"{code}\nimport sys\nprint('LOADED', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("path", LIGHT, ids=dotted)
def test_light_modules_name_no_heavy_package_at_module_level(path: Path) -> None:
    assert not module_level_imports(ast.parse(SOURCES[path])) & HEAVY_PACKAGES


def test_importing_every_light_module_leaves_torch_out() -> None:
    names = ", ".join(dotted(path) for path in LIGHT)
    assert not loaded_after(f"import {names}") & HEAVY_PACKAGES


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list"], ["list", "--json"]], ids=" ".join)
def test_a_command_that_measures_nothing_loads_neither_torch_nor_numpy(arguments: list[str]) -> None:
    code = (
        "from dilabench.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
    )
    assert not loaded_after(code) & {*HEAVY_PACKAGES, "numpy", "scipy", "matplotlib"}


@pytest.mark.parametrize("reporter", ["table", "json", "markdown"])
def test_reporting_does_not_load_torch(reporter: str) -> None:
    code = (
        "from pathlib import Path\n"
        "from dilabench.plugins.manager import discover\n"
        "from dilabench.plugins.catalogue import load_target\n"
        "from dilabench.record import RunRecord\n"
        "record = RunRecord.model_validate_json(Path('tests/golden/run_record.v1.json').read_text())\n"
        f"assert load_target(discover().catalogue.reporters.get({reporter!r}).target)(record, None)\n"
    )
    assert not loaded_after(code) & HEAVY_PACKAGES


def test_names_say_what_a_module_is_for() -> None:
    parts = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    history = {part for part in parts if part.endswith(("_v1", "_v2", "_v3", "_new", "_old", "_improved"))}
    assert not parts & FORBIDDEN_NAMES
    assert not history


def logic_lines(function: ast.FunctionDef) -> int:
    """Lines of a function's body. Signatures (the options of a command) and one returned table are data, not logic."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    if not body or (len(body) == 1 and isinstance(body[0], ast.Return)):
        return 0
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


@pytest.mark.parametrize("path", [path for path in MODULES if top(path) != "kernels"], ids=dotted)
def test_modules_and_functions_hold_one_idea(path: Path) -> None:
    source = SOURCES[path]
    assert len(source.splitlines()) <= MAX_MODULE_LINES
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lengths = {function.name: logic_lines(function) for function in functions}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


@pytest.mark.slow
def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter", reason="import-linter is part of the dev extra")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
