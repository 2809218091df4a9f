"""The shape of the code base: what may import what, what a command loads, how files and folders are cut."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dilabench"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = {path: path.read_text() for path in MODULES}

HEAVY = (
    "attention",
    "compat",
    "testing.py",
    "contracts.py",
    "impls",
    "backends",
    "kernels",
    "distributed",
    "engine",
)
# design.md §2: the library, and the light modules that both halves read.
LIBRARY = {
    "attention",
    "compat",
    "choice",
    "impls",
    "backends",
    "kernels",
    "distributed",
    "patterns",
    "workload",
    "contracts.py",
}
SHARED = {"errors", "units", "validation", "machine", "metadata", "atomic_file", "retired"}
NOT_FOR_MODELS = {"pluggy", "typer", "rich", "scipy", "matplotlib", "jinja2"}
MOST_LOADED_MODULES = 61
HEAVY_PACKAGES = {"torch", "triton", "flash_attn", "flash_attn_interface", "xformers"}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base"}
# Metaphors and words that design.md §1 replaces: a name should be what a reader of the field would search for.
FORBIDDEN_WORDS = {"desk", "door", "station", "shelf", "lent", "kin", "lone", "cell", "contender", "stranger"}
MAX_MODULES_IN_FOLDER = 16
MAX_MODULE_LINES = 450
SHORT_MODULE_LINES = 30
MAX_SHORT_MODULES = 12


def top(path: Path) -> str:
    """The first part of a module's path below the package: 'engine' or 'record.py'."""
    return path.relative_to(PACKAGE).parts[0]


def dotted(path: Path) -> str:
    """The import name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {dotted(path) for path in MODULES}

# Of `choice`, these compute.
HEAVY_CHOICE = {"computation.py", "first_use.py"}
LIGHT = [
    path
    for path in MODULES
    if top(path) not in HEAVY
    and path.name != "__main__.py"
    and not (top(path) == "choice" and path.name in HEAVY_CHOICE)
]


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


def modules_after(code: str) -> set[str]:
    """The modules in sys.modules after running `code` in a fresh process."""
    script = f"{code}\nimport sys\nprint('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def loaded_after(code: str) -> set[str]:
    """Top-level packages in sys.modules after running `code` in a fresh process."""
    return {name.partition(".")[0] for name in modules_after(code)}


def modules_named(tree: ast.Module) -> set[str]:
    """Modules of dilabench that a module names: in any import statement, `TYPE_CHECKING` included, and in targets."""
    named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= set(re.findall(r"^(dilabench[\w.]*)(?::\w+)?$", node.value))
    return {name for name in named if name.startswith("dilabench.")}


def files_imported_by(path: Path) -> set[str]:
    """Our files that a file imports anywhere, by their import names: in functions, under `TYPE_CHECKING`, and by
    `import_module` of a name that is written out.
    """
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    imported: set[str] = set()
    pending: list[ast.AST] = [ast.parse(SOURCES[path])]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            # `from package import module` is an import of the module's file, where there is one.
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in FILES else base for alias in node.names]
        else:
            names = [text for text in called_with(node, "import_module") if text.startswith("dilabench.")]
            pending += ast.iter_child_nodes(node)
        imported |= {name for name in names if name in FILES}
    return imported - {dotted(path)}


def called_with(node: ast.AST, function: str) -> list[str]:
    """The text arguments of a call of this function, `module.function` too; empty for another node."""
    if not isinstance(node, ast.Call):
        return []
    if function not in (getattr(node.func, "attr", None), getattr(node.func, "id", None)):
        return []
    return [argument.value for argument in node.args if isinstance(argument, ast.Constant)]


def test_no_files_import_in_a_circle() -> None:
    imported = {dotted(path): files_imported_by(path) for path in MODULES}
    # What imports nothing that is left is in no circle.
    left = dict(imported)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert {name: sorted(others & left.keys()) for name, others in left.items()} == {}


def test_the_library_names_nothing_of_the_benchmark() -> None:
    allowed = {name.removesuffix(".py") for name in LIBRARY} | SHARED
    found = {
        dotted(path): {name for name in modules_named(ast.parse(SOURCES[path])) if name.split(".")[1] not in allowed}
        for path in MODULES
        if top(path) in LIBRARY | {f"{name}.py" for name in SHARED}
    }
    assert {name: above for name, above in found.items() if above} == {}


A_CALL = """
import torch
from dilabench.attention import dilated_attention
q = torch.randn(1, 256, 2, 16)
dilated_attention(q, q, q, segment_lengths=(64, 256), dilation_rates=(1, 4), causal=True)
"""


def test_a_call_of_the_library_loads_few_modules_and_nothing_of_the_benchmark() -> None:
    loaded = modules_after(A_CALL)
    assert not {name.partition(".")[0] for name in loaded} & NOT_FOR_MODELS
    ours = sorted(name for name in loaded if name.partition(".")[0] == "dilabench")
    assert len(ours) <= MOST_LOADED_MODULES, ours


def test_importing_every_light_module_leaves_torch_out() -> None:
    names = ", ".join(dotted(path) for path in LIGHT)
    assert not loaded_after(f"import {names}") & HEAVY_PACKAGES


def test_reporting_does_not_load_torch() -> None:
    code = (
        "from pathlib import Path\n"
        "from dilabench.plugins.manager import discover\n"
        "from dilabench.choice.descriptors import load_target\n"
        "from dilabench.store.run_files import read_record\n"
        "record = read_record(Path('tests/golden/run_record.v1.json'))\n"
        "for name in ('table', 'json', 'markdown'):\n"
        "    assert load_target(discover().catalogue.reporters.get(name).target)(record, None)\n"
    )
    assert not loaded_after(code) & HEAVY_PACKAGES


def test_names_say_what_a_module_is_for() -> None:
    parts = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    history = {part for part in parts if part.endswith(("_v1", "_v2", "_v3", "_new", "_old", "_improved"))}
    words = {word for part in parts for word in part.split("_")}
    assert not parts & FORBIDDEN_NAMES
    assert not words & FORBIDDEN_WORDS
    assert not history


def test_modules_are_not_too_long_to_hold_one_idea() -> None:
    lines = {dotted(path): len(SOURCES[path].splitlines()) for path in MODULES if top(path) != "kernels"}
    assert {name: count for name, count in lines.items() if count > MAX_MODULE_LINES} == {}


# Factories whose dtype is torch's default if none is given; of others it follows from their numbers.
OF_DEFAULT_DTYPE = {"empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def unnamed(call: ast.Call, factories: set[str]) -> list[str]:
    """The options that a call of one of torch's factories leaves to torch's defaults."""
    name = ast.unparse(call.func).removeprefix("torch.")
    given = {keyword.arg for keyword in call.keywords}
    if name not in factories or ast.unparse(call.func) == name:
        return []
    return sorted(({"device"} | ({"dtype"} if name in OF_DEFAULT_DTYPE else set())) - given)


@pytest.mark.parametrize("folder", ["attention", "impls", "kernels", "backends", "distributed"])
def test_factories_of_tensors_name_their_device_and_dtype(folder: str) -> None:
    """A caller may have set other defaults (torch.set_default_device, torch.set_default_dtype)."""
    from torch.utils._device import _device_constructors

    factories = {factory.__name__ for factory in _device_constructors()}
    assert unnamed(ast.parse("torch.full(2, 0.5)").body[0].value, factories) == ["device", "dtype"]
    wrong = {
        f"{path}:{node.lineno}": unnamed(node, factories)
        for path in MODULES
        if top(path) == folder
        for node in ast.walk(ast.parse(SOURCES[path]))
        if isinstance(node, ast.Call)
    }
    assert {place: missing for place, missing in wrong.items() if missing} == {}


def test_few_modules_are_too_short_to_hold_an_idea() -> None:
    ideas = [path for path in MODULES if path.name not in {"__init__.py", "__main__.py"}]
    short = [dotted(path) for path in ideas if len(SOURCES[path].splitlines()) < SHORT_MODULE_LINES]
    assert len(short) <= MAX_SHORT_MODULES, short


def test_a_folder_that_holds_many_modules_has_rooms_inside() -> None:
    counts = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {str(folder): count for folder, count in counts.items() if count > MAX_MODULES_IN_FOLDER} == {}


def test_every_folder_says_what_it_is_for() -> None:
    folders = {path.parent for path in MODULES}
    assert [one for one in folders if not ast.get_docstring(ast.parse((one / "__init__.py").read_text()))] == []


@pytest.mark.needs_extra("dev", "import-linter")
def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
