"""Several values after one option, and underscores, as the source documents write them."""

import json

import pytest

from dilabench.cli.app import COMMANDS
from dilabench.cli.arguments import INSTEAD, OLD_NAMES, spread


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


def test_every_old_name_stands_for_an_option_of_run():
    (run,) = [one.loaded({}) for one in COMMANDS if one.name == "run"]
    options = {option for parameter in run.params for option in parameter.opts}
    assert set(OLD_NAMES.values()) <= options
    assert not options & {*OLD_NAMES, *INSTEAD}
