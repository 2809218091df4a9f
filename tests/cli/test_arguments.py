"""Several values after one option, and underscores, as the source documents write them."""

import json
from inspect import signature

import pytest

from dilabench.cli import spread
from dilabench.cli.app import COMMANDS, INSTEAD
from dilabench.cli.options import OldNames


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            "run quick --implementations dilated improved ring_v2",
            "run quick --implementations dilated --implementations improved --implementations ring_v2",
        ),
        (
            "run range --range custom --custom-lengths 2048 -5 --batch-size 1",
            "run range --range custom --custom-lengths 2048 --custom-lengths -5 --batch-size 1",
        ),
        ("run quick --sequence_lengths 1K 2K -o out", "run quick --sequence-lengths 1K --sequence-lengths 2K -o out"),
        ("run --implementations=a quick", "run --implementations=a quick"),
        ("run quick --batch_size=8 --seq_len 5", "run quick --batch-size=8 --seq-len 5"),
        ("run quick --set seq_len=5 -i a_b", "run quick --set seq_len=5 -i a_b"),
        ("run quick --implementations", "run quick --implementations"),
        ("verify -- --batch_size a b", "verify -- --batch_size a b"),
        ("", ""),
    ],
)
def test_spread(written, read):
    assert spread(written.split()) == read.split()


def test_names_from_elsewhere_are_understood_where_the_command_has_the_option(cli):
    options = "--seq-len 1K --heads 4 --batch=2 --precision fp32 --iterations 3 --warmup 2"
    result = cli("run", "implementations", "-i", "gather", *options.split(), "--device", "cpu", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    (case,) = json.loads(result.stdout)
    shape = case["workload"]
    assert (shape["seq_len"], shape["num_heads"], shape["batch_size"], shape["dtype"]) == (1024, 4, 2, "float32")
    assert cli("list", "--heads", "4").exit_code == 2


def test_what_goes_another_way_is_answered_with_it(cli):
    result = cli("run", "quick", "--segment-lengths", "1K,2K")
    assert result.exit_code == 2
    assert "write instead: --set segment_lengths=" in result.stderr


# A group of commands has no options that others know by another name.
@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if command.name not in ("baseline", "plugin")],
    ids=lambda command: command.name,
)
def test_no_old_name_is_that_of_an_option(command):
    loaded = command.loaded({})
    options = {option for parameter in loaded.params for option in parameter.opts}
    annotations = [parameter.annotation for parameter in signature(loaded.callback).parameters.values()]
    parts = [part for annotation in annotations for part in getattr(annotation, "__metadata__", ())]
    old = [name for part in parts if isinstance(part, OldNames) for name in part]
    assert len(old) == len(set(old))
    assert not options & {*old, *INSTEAD}
    assert command.name not in ("run", "plan", "verify", "tune") or set(loaded.renamed(old)) <= options


def test_old_names_are_not_shown(cli):
    text = cli("run", "--help").stdout
    assert "--seqlen" in text
    assert "--seq-len " not in text
    assert cli("run", "extreme", "--max-seq-len", "x").stderr.startswith("error: max_seq_length 'x' is not a number")
