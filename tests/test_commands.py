"""The commands that README, docs and a generated plug-in show: run if that takes a moment, otherwise parsed."""

import glob
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dilabench.cli import spread
from dilabench.cli.app import COMMANDS, app
from dilabench.cli.author.new import Kind, new
from dilabench.report.content import reproduce_command
from dilabench.store.archive import Archive
from dilabench.store.run_files import read_record
from tests.conftest import made_record, made_row, slow

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# cli.md holds the help of each command, with its metavariables.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(page for page in sorted(DOCS.rglob("*.md")) if page.name != "cli.md"),
    *sorted(DOCS.rglob("*.yml")),
    *sorted((ROOT / "tests" / "examples").glob("*.sh")),
]
PROGRAM = re.compile(r"dilabench|pip|pytest|python3?|torchrun|(?:scripts|\.ci)/\w+|mkdocs")
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
# What a shell or a workflow puts in the place of a variable.
VALUES = {
    r"\$\(\([^)]*\)\)": "1",
    r'"\$@"': "range",
    r"\$\{\{ inputs\.budget \}\}": "60s",
    r"\$\{\{[^}]*\}\}": "quick",
    r"\$\{?\w+\}?": "1",
    r"\.\.\.(?=\s|$)": "",
}


def shown(path: Path) -> Iterator[str]:
    """The texts of a file that may be commands: a shell's and a workflow's lines, indented blocks, code in a line."""
    text = path.read_text()
    if path.suffix != ".md":
        yield from text.replace("\\\n", " ").splitlines()
        return
    for _, language, block in BLOCK.findall(text):
        if language in ("", "bash", "sh", "console", "yaml"):
            yield from block.replace("\\\n", " ").splitlines()
    rest = BLOCK.sub("", text)
    yield from (line[4:] for line in rest.replace("\\\n", " ").splitlines() if line.startswith("    "))
    # In a table a bar is escaped.
    yield from (code.replace("\\|", "|") for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest))


def commands(line: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a line of shell that begins with one of PROGRAM."""
    line = re.sub(r"^\s*(?:- )?(?:run: )?", "", line)
    for pattern, value in VALUES.items():
        line = re.sub(pattern, value, line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set("();<>|&"):
            while command and (command[0] in ("do", "then", "exec") or re.fullmatch(r"[A-Z_]+=.*", command[0])):
                del command[0]
            if command and PROGRAM.fullmatch(program := re.sub(r"^(?!scripts|\.ci).*/", "", command[0])):
                yield program, *command[1:]
            command = []
        else:
            command.append(word)


def all_commands() -> dict[tuple[str, ...], str]:
    """Every command, and the page that shows it first."""
    found: dict[tuple[str, ...], str] = {}
    for page in PAGES:
        for line in shown(page):
            for words in commands(line):
                words = of_dilabench(words) or words
                if words != ("dilabench",):
                    found.setdefault(words, str(page.relative_to(ROOT)))
    return found


def of_dilabench(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """`python -m dilabench ...` and torchrun's as `dilabench ...`; None for other programs."""
    if words[0] == "dilabench":
        return words
    for at, pair in enumerate(pairwise(words)):
        if pair == ("-m", "dilabench"):
            return "dilabench", *words[at + 2 :]
    return None


COMMANDS_SHOWN = all_commands()
# What these do takes a moment and needs nothing but records.
RUN_AS_SHOWN = {"list", "describe", "doctor", "report", "history", "compare", "merge", "baseline"}


def of(*programs: str) -> Any:
    """A test of every command of these programs; of dilabench's many two of three are slow."""
    chosen = [words for words in COMMANDS_SHOWN if words[0] in programs]
    assert chosen, programs
    cases = [slow(words) if at % 3 and words[0] == "dilabench" else words for at, words in enumerate(chosen)]
    return pytest.mark.parametrize("words", cases, ids=" ".join)


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Make the package in a folder importable, and its entry point known, as pip would."""

    def add(folder: Path) -> None:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        about = tmp_path / "site" / f"{project['name'].replace('-', '_')}-1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1\n")
        ((name, module),) = project["entry-points"]["dilabench"].items()
        (about / "entry_points.txt").write_text(f"[dilabench]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(folder)
        monkeypatch.syspath_prepend(about.parent)

    return add


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """The files that pages name, by path: records, runs in folders, workloads, a model's configuration."""

    def record(run_id: str, shard: str | None = None, **fields: Any) -> str:
        rows = [made_row("gather", ns=2e7, **fields), made_row("strided", position=1, **fields)]
        return made_record(rows, run_id, config={"suite": "quick", "shard": shard}).model_dump_json()

    alone = ("RUN", "BASE", "NEW", "FILE", "RECORD", "base", "branch", "other", "main")
    alike = ("baseline/1", "baseline-runs/1-quick-1", "base-runs/1", "branch-runs/1", "benchmark_results/RUN", "1")
    # `results/*` are two, `results/1/*` the first and what is in its folder.
    shards = {"results/1": "1/2", "results/2": "2/2", "results/1/1": "2/2"}
    model, of_transformers = (
        re.findall(r"```toml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[0]
        for page in ("tutorial.md", "how-to/measure-models.md")
    )
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    return {
        "model.toml": model,
        "my-model.toml": of_transformers,
        "my-model/config.json": json.dumps({"model_type": "llama", **sizes}),
        **{name: record(f"aa{at}") for at, name in enumerate(alone)},
        **{f"{name}/run.json": record(f"bb{at}") for at, name in enumerate(alike)},
        **{
            f"{name}/run.json": record(f"cc{at}", part, seq_len=64 + at)
            for at, (name, part) in enumerate(shards.items())
        },
        "shared/run.json": record("dd", seq_len=128),
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> Path:
    """A working folder with these files, and a run in its store."""
    monkeypatch.delenv("DILABENCH_STORE", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    # To trace memory at each length takes longer than all else here.
    monkeypatch.setattr("dilabench.predict.memory.plan_memory", lambda *_: None)
    working = tmp_path / "working"
    for name, text in files.items():
        (working / name).parent.mkdir(parents=True, exist_ok=True)
        (working / name).write_text(text)
    (working / "docs").symlink_to(DOCS)
    monkeypatch.chdir(working)
    Archive().add(read_record(Path("RUN")))
    return working


def invoked(*words: str) -> None:
    done = CliRunner().invoke(app, spread(words), prog_name="dilabench")
    assert done.exit_code == 0, f"{shlex.join(('dilabench', *words))}\n{done.output}"


def understood(*words: str) -> None:
    """Raise click's error unless a command with these arguments would begin."""
    (entry,) = (entry for entry in COMMANDS if entry.name == words[0])
    first, *arguments = spread(words)
    command = entry.loaded({}, arguments)
    if commands_of_group := getattr(command, "commands", None):
        first, *arguments = arguments
        command = commands_of_group[first]
    # A command without arguments is mentioned, not shown.
    if arguments:
        command.make_context(first, list(arguments))


def tried(*words: str) -> None:
    """Run a command; only plan what a run would measure, and only read what else takes long."""
    words = tuple(path for word in words for path in (sorted(glob.glob(word)) if "*" in word else [word]))
    if words[0] == "run" and len(words) > 1 and "--resume" not in words:
        invoked(*words, *(() if "--dry-run" in words else ("--dry-run",)))
    elif words[0] in RUN_AS_SHOWN and len(words) > (words[0] not in ("list", "doctor", "history")):
        invoked(*words)
    else:
        understood(*words)


@of("dilabench")
@pytest.mark.usefixtures("folder")
def test_dilabench(words: tuple[str, ...], register: Callable[[Path], None]) -> None:
    _, command, *arguments = words
    if {"masked", "chunked"}.intersection(arguments):
        register(ROOT / "tests" / "example_plugin")
    values = {"NAME": "quick", "SUITE": "quick", "FILE": "model.toml"} if command == "run" else {"NAME": "gather"}
    tried(command, *(values.get(word, word) for word in arguments))


@of("pytest", "scripts/test")
def test_pytest(words: tuple[str, ...], pytestconfig: pytest.Config) -> None:
    options = pytestconfig._parser.parse(words[1:])
    known = {marker.partition(":")[0].partition("(")[0] for marker in pytestconfig.getini("markers")}
    assert set(re.findall(r"\w+", options.markexpr)) - {"not", "and", "or"} <= known
    # The generated package's folder.
    assert all((ROOT / path).exists() for path in options.file_or_dir if path != "my-attention")


@of("pip")
def test_pip(words: tuple[str, ...], tmp_path: Path) -> None:
    new("my-attention", Kind.IMPLEMENTATION, tmp_path)
    projects = {".": ROOT, "dilabench": ROOT, "./my-attention": tmp_path / "my-attention"}
    assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).is_file()
    for word in words:
        package, bracket, extra = word.rstrip("]").partition("[")
        if bracket:
            project = tomllib.loads((projects[package] / "pyproject.toml").read_text())["project"]
            assert extra in project["optional-dependencies"]


@of("python", "scripts/check", "scripts/docs", ".ci/run")
def test_scripts(words: tuple[str, ...]) -> None:
    program = words[1] if words[0] == "python" else words[0]
    assert program == "-m" or (ROOT / program).is_file()


@of("torchrun")
def test_torchrun(words: tuple[str, ...]) -> None:
    from torch.distributed.run import get_args_parser

    # Some name an option only.
    get_args_parser().parse_args([*words[1:], "script.py"])


@pytest.mark.parametrize("kind", list(Kind))
def test_a_generated_package(kind: Kind, folder: Path, register: Callable[[Path], None]) -> None:
    # A name for each, because modules stay loaded.
    name = f"my-{kind}"
    new(name, kind, folder)
    register(folder / name)
    page = (folder / name / "README.md").read_text()
    install, test, use = (words for line in re.findall(r"^    (.+)$", page, re.MULTILINE) for words in commands(line))
    assert install == ("pip", "install", "-e", ".[test]")
    assert test == ("pytest",)
    tried(*use[1:])
    assert all((folder / name / file).is_file() for file in re.findall(r"^\| `([\w./]+)` \|", page, re.MULTILINE))


@pytest.mark.parametrize("path", sorted((DOCS / "results").glob("*.json.xz")), ids=lambda path: path.stem)
def test_what_a_record_says_of_repeating_it(path: Path) -> None:
    """Every name in the command is known, or a comment says what became of it."""
    text = reproduce_command(read_record(path))
    line, *comments = text.splitlines()
    for _, *words in commands(line):
        understood(*words)
    assert all(comment.startswith("# ") for comment in comments)
    assert line.startswith(("dilabench ", "# no command repeats this run"))
