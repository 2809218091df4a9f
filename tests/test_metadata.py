"""The registry of labels, counters and notes: everything that is written is in it, or has its plug-in's name."""

import ast
import re
from pathlib import Path

import pytest

from dilabench.errors import PluginError
from dilabench.machine import Machine
from dilabench.metadata import (
    COUNTERS,
    FEW_SAMPLES,
    INTERFERENCE,
    LABELS,
    LAUNCH_BOUND,
    NOTES,
    SPARSITY_REACHED,
    STREAM_WALL_NS,
    TRAFFIC,
    WAY,
    note_figures,
    note_text,
    refuse_unknown,
    traffic_key,
)
from dilabench.plugins import Suite
from dilabench.plugins.manager import discover
from dilabench.record import Note, Skipped
from dilabench.request import run_request
from dilabench.suites.planner import expand

PACKAGE = Path(__file__).parents[1] / "dilabench"


@pytest.mark.parametrize("what", ["label", "counter", "note"])
def test_a_bare_key_that_nobody_registered_is_refused(what):
    with pytest.raises(PluginError, match=f"{what} 'speed' is not one of dilabench's own.*'plugin:speed'"):
        refuse_unknown(what, ["ours:speed", "speed"])
    with pytest.raises(PluginError):
        refuse_unknown(what, [":speed"])
    refuse_unknown(what, ["ours:speed", "my-plugin.two:a b"])


@pytest.mark.parametrize(("what", "known"), [("label", LABELS), ("counter", COUNTERS), ("note", NOTES)])
def test_every_entry_is_known_and_says_what_it_is(what, known):
    refuse_unknown(what, known)
    assert all(one.meaning and one.key == key for key, one in known.items())


def labelling(request, planner):
    """A suite of a plug-in with a label of its own."""
    asked = planner.workload_requests([{"seq_len": 256}])[0]
    labels = {request.options["label"]: "7"}
    return planner.plan(planner.catalogue.implementations.get("strided"), asked, labels)


def test_a_suite_names_its_labels_after_its_plug_in():
    catalogue, cpu = discover().catalogue, Machine(device="cpu")
    catalogue.suites.add(Suite("ours", "", f"{__name__}:labelling"), "ours")

    def planned(label):
        return expand(catalogue, cpu, run_request(catalogue, suite="ours", run={"options": {"label": label}}))

    assert [one.labels for one in planned("ours:speed")] == [{"ours:speed": "7"}]
    with pytest.raises(PluginError, match="label 'speed'"):
        planned("speed")


def test_values_are_read_as_their_type(make_row):
    planned = make_row(labels=WAY.entry("chunked") | SPARSITY_REACHED.entry(0.8125)).planned
    assert planned.labels == {"way": "chunked", "sparsity_reached": "0.8125"}
    assert (WAY.of(planned), SPARSITY_REACHED.of(planned)) == ("chunked", 0.8125)
    assert WAY.of(make_row().planned) is None
    assert STREAM_WALL_NS.of(Skipped(code="budget", why="")) is None
    assert STREAM_WALL_NS.shown(1_500_000) == "1.5 ms"


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (LAUNCH_BOUND.note("m", observed=353_000, threshold=268_000), "m (host 353 µs, GPU 268 µs)"),
        (FEW_SAMPLES.note("m", observed=5, threshold=20, hint="h"), "m (seen 5, limit 20); h"),
        (NOTES["no_flush"].note("m", observed=2**30), "m (inputs 1.0 GiB)"),
        (NOTES["interference"].note("m", observed=-0.037, threshold=0.03), "m (seen -3.7%, limit 3.0%)"),
        (Note(code="ours:heat", message="m", observed=1234.5), "m (seen 1.23e+03)"),
        (Note(code="streamed", message="m"), "m"),
    ],
)
def test_a_note_is_shown_in_its_unit(note, text):
    assert note_text(note) == text


@pytest.mark.parametrize(
    ("message", "figures"),
    [
        ("no figure", "seen 17.5%, limit 8.3%"),
        ("it is 17.5% slower", "limit 8.3%"),
        ("17.5% with at most 8.3%", ""),
        ("117.5% is another figure", "seen 17.5%, limit 8.3%"),
    ],
)
def test_figures_of_the_message_are_not_repeated(message, figures):
    assert note_figures(INTERFERENCE.note(message, observed=0.175, threshold=0.083)) == figures


def test_what_travels_is_counted_under_registered_keys():
    assert {traffic_key("sent", kind) for kind in TRAFFIC} <= COUNTERS.keys()
    assert traffic_key("received", "ours:rows") == "ours:received_rows_bytes"


def nodes_of(text):
    """The syntax of every file that this regular expression finds anything in."""
    for path in PACKAGE.rglob("*.py"):
        if re.search(text, source := path.read_text()):
            yield from ((path, node) for node in ast.walk(ast.parse(source)))


def test_notes_are_made_by_the_registry_only():
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path, node in nodes_of(r"\bNote\b")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Note"
    }
    assert callers == {"metadata.py"}


def test_no_decision_is_made_on_the_beginning_of_a_reason():
    """Outside the migration of old records nothing looks into `why` or `message`."""
    looking = {
        f"{path.relative_to(PACKAGE).as_posix()}: {ast.unparse(node)}"
        for path, node in nodes_of(r"\.\s*(startswith|endswith|lower|find)\b")
        if isinstance(node, ast.Attribute)
        and node.attr in {"startswith", "endswith", "lower", "find"}
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in {"why", "message", "method", "detail"}
    }
    assert looking == set()
