"""What `dilabench plugin new` writes installs with pip, conforms, and passes its own test, in fresh processes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dilabench.cli.author.new import Kind, new
from tests.plugins.fresh_process import Said, answers, python

pytestmark = pytest.mark.slow
# An offset that is blocked where modulo is asked for.
WRONG = """
    blocked = {**workload.model_dump(), "pattern": {**workload.pattern.model_dump(), "offset": "blocked"}}
    workload = Workload.model_validate(blocked) if workload.pattern.kind == "dilated" else workload
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed a generated package of each kind into."""
    pytest.importorskip("hatchling", reason="needs [test]: hatchling is not installed")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for kind in Kind:
        new(f"generated-{kind}", kind, source)
    new("generated-wrong", Kind.IMPLEMENTATION, source)
    code = source / "generated-wrong" / "generated_wrong" / "attention.py"
    body = '"""Set up, untimed, and return the function that is verified and timed."""\n'
    assert body in code.read_text()
    code.write_text(code.read_text().replace(body, body + WRONG))
    plugin = code.with_name("plugin.py")
    # Enough to be found out by: the package of its kind that is right is checked in full.
    few = '(patterns=frozenset({"dilated"}), dtypes=frozenset({"float32"}))'
    plugin.write_text(plugin.read_text().replace("(patterns=ANY_PATTERN)", few))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    folders = [str(path) for path in source.iterdir()]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), *folders]
    subprocess.run(install, check=True, capture_output=True, text=True)
    (target / "sources").symlink_to(source)
    return target


@pytest.fixture(scope="module")
def checked(site: Path) -> dict[str, Said]:
    """What `plugin check` answers for each package; in one process, which starts what verifies once for all of them."""
    names = [f"generated-{kind}" for kind in Kind]
    asked = {name: ["plugin", "check", name, "--device", "cpu", "--json"] for name in names}
    asked["generated-wrong"] = ["plugin", "check", "generated-wrong", "--device", "cpu"]
    return answers(site, asked)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_new_package_conforms(checked: dict[str, Said], kind: Kind) -> None:
    code, said, told = checked[f"generated-{kind}"]
    assert code == 0, said + told
    (card,) = json.loads(said)
    assert card["passed"]
    assert card["plugin"] == f"generated-{kind}"
    assert len(card["package"]) == 4


def test_its_own_test_passes(site: Path) -> None:
    done = python(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(site / "sources" / "generated-reporter"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_a_wrong_one_gets_the_name_of_its_mistake(checked: dict[str, Said]) -> None:
    code, said, told = checked["generated-wrong"]
    assert code == 5, said + told
    assert re.search(r"^verifying \d+ cases \.\.\.$", told, re.MULTILINE)
    text = " ".join(said.split())
    # Where it is told first, with the place; after that its name is enough.
    assert re.search(r"cases?: out is that of offset=blocked; out: .*?; error", text)
    assert "cases: out is that of offset=blocked" in text
    assert "implementation generated-wrong: DOES NOT CONFORM" in text
