"""Run requests: where fields come from, which source wins, what is refused."""

import pytest

from dilabench.errors import ConfigError
from dilabench.request import (
    RunRequest,
    read_assignments,
    read_budget,
    read_config,
    run_request,
)
from dilabench.suites.planner import workload_request


def refusal(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_presets_files_set_and_options_come_together(catalogue, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[workload]\nnum_heads = 6\nhead_dim = "80"\ncausal = false\n'
        '[run]\nimplementations = ["gather"]\nlengths = ["2K", 777]\nbudget = "90s"\nseed = 3\n'
        '[run.options]\noffload = true\nmax_seq_length = "4K"\n'
    )
    request = run_request(
        catalogue,
        suite="extreme",
        configs=["medium", str(file)],
        assignments=["causal=true", "window=5,0"],
        workload={"head_dim": "24"},
        run={"seed": 4, "options": {"max_seq_length": "8K"}},
    )
    assert request.presets == ("medium",)
    assert request.overrides == {"num_heads": 6, "head_dim": 24, "causal": True, "window": (5, 0)}
    assert (request.implementations, request.lengths, request.budget_s) == (("gather",), (2048, 777), 90.0)
    assert (request.seed, request.options) == (4, {"offload": True, "max_seq_length": 8192})


def test_a_request_survives_json(catalogue):
    request = run_request(
        catalogue, suite="quick", assignments=["segment_lengths=2K,4K", "window=5,0"], run={"lengths": [1024]}
    )
    again = RunRequest.model_validate_json(request.model_dump_json())
    assert workload_request(catalogue, None, again.overrides) == workload_request(catalogue, None, request.overrides)
    assert again.lengths == (1024,)


def test_assignments_are_read_as_toml_or_text():
    assert read_assignments(
        ["seq-len=4K", "causal=false", "segment_lengths=[1, 2]", "scale=0.5", "window=1,0", "a=b=c"]
    ) == {
        "seq_len": "4K",
        "causal": False,
        "segment_lengths": [1, 2],
        "scale": 0.5,
        "window": "1,0",
        "a": "b=c",
    }


@pytest.mark.parametrize("text", ["seq_len", "=5", ""])
def test_an_assignment_needs_a_key(text):
    assert "has no 'key='; write for example --set seq_len=4096" in refusal(read_assignments, [text])


NAMES = [
    ({"configs": ["medum"]}, "unknown workload 'medum'; did you mean medium"),
    ({"run": {"implementations": ["stridet"]}}, "unknown implementation 'stridet'; did you mean strided"),
    ({"run": {"backends": ["sdpa-flsh"]}}, "unknown backend 'sdpa-flsh'; did you mean sdpa-flash"),
    ({"run": {"backends": ["aut"]}}, "unknown backend 'aut'; did you mean auto"),
    ({"assignments": ["seqlen=5"]}, "seqlen: unknown key; did you mean seq_len?"),
    ({"assignments": ["head_dim=5"], "workload": {"head_dim": "6"}}, "head_dim is given twice: '6' and, by --set, 5"),
    (
        {"workload": {"seq_len": "5"}, "run": {"lengths": [6]}},
        "seq_len=5 and lengths [6] are both given; leave one out",
    ),
    ({"run": {"lengths": [6, 7, 6]}}, "[6, 7, 6] repeats 6; give each length once"),
    ({"run": {"lengths": [0]}}, "lengths 0 must be at least 1"),
    ({"run": {"nproc": 0}}, "nproc 0 should be greater than or equal to 1"),
    ({"run": {"seed": -1}}, "seed -1 should be greater than or equal to 0"),
    ({"run": {"device": "cuda:1"}}, "device 'cuda:1' must be auto, cpu, cuda or the name of another, with no number"),
]


@pytest.mark.parametrize(("given", "text"), NAMES)
def test_requests_are_refused_with_value_rule_and_way_out(catalogue, given, text):
    assert text in refusal(run_request, catalogue, suite="quick", **given)


def test_the_same_value_given_twice_is_no_contradiction(catalogue):
    request = run_request(catalogue, suite="quick", assignments=["head_dim=64"], workload={"head_dim": "64"})
    assert request.overrides == {"head_dim": 64}


FILES = [
    ("[workload\n", "is not valid TOML: "),
    ("seq_len = = 5\n", "is not valid TOML: "),
    ("[workload]\nseqlen = 5\n", "seqlen: unknown key; did you mean seq_len?"),
    ("[workload]\nseq_len = 'abc'\n", "seq_len 'abc' is not a number"),
    ("[run]\nbatch_size = 5\n", "batch_size: unknown key; known: "),
    ("[run]\nbudget = 'soon'\n", "duration 'soon' is not a positive time"),
    ("[run]\nsuite = 'quick'\n", "[run] cannot hold 'suite'; name the suite on the command line"),
    ("[wrokload]\n", "unknown table 'wrokload'; did you mean workload"),
    ("workload = 5\n", "unknown table 'workload'"),
]


@pytest.mark.parametrize(("content", "text"), FILES)
def test_a_wrong_file_is_named_with_its_mistake(tmp_path, content, text):
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    message = refusal(read_config, file)
    assert text in message
    assert str(file) in message


def test_a_syntax_error_is_placed(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text("[workload]\nseq_len = \n")
    assert "line 2" in refusal(read_config, file)


def test_a_file_that_is_not_text_or_not_there(tmp_path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not valid TOML" in refusal(read_config, binary)
    assert "cannot be read: No such file" in refusal(read_config, tmp_path / "none.toml")
    assert "cannot be read: it is a folder" in refusal(read_config, tmp_path)


def test_a_set_is_not_one_workload(catalogue):
    assert "'gqa' is a set of workloads (qwen3_4b, qwen3_14b, qwen3_32b); name one" in refusal(
        workload_request, catalogue, "gqa", {}
    )


@pytest.mark.parametrize(("text", "seconds"), [("none", None), (" none ", None), ("90s", 90.0), ("2m", 120.0)])
def test_a_budget_is_a_time_or_none(text, seconds):
    assert read_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "None", "never", "-5s"])
def test_other_words_are_no_budget(text):
    with pytest.raises(ConfigError):
        read_budget(text)
