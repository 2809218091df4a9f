"""Suite `model`: its rows, models of a user, and the answer: how much faster a step is, and its share of attention."""

import json

import pytest

import dilabench
from dilabench.engine.case_spec import second_implementations
from dilabench.errors import ConfigError, EnvironmentNotReady
from dilabench.machine import Machine
from dilabench.patterns.dense import DENSE
from dilabench.plugins.builtin.model_presets import MODELS
from dilabench.plugins.manager import discover
from dilabench.record import GpuInfo
from dilabench.report.columns import ABSENT, COLUMNS
from dilabench.report.content import workload_tables
from dilabench.report.markdown import to_text
from dilabench.request import run_request
from dilabench.suites.model import analyse
from dilabench.suites.planner import expand, workload_request
from dilabench.workload.model import ITSELF

CPU = Machine(device="cpu", no_cuda="no NVIDIA GPU is visible")
HOPPER = Machine(device="cuda", gpus=(GpuInfo(name="H200", compute_capability="9.0", memory_bytes=150 * 10**9),))
DILATED = {"pattern": "dilated", "segment_lengths": (64, 128), "dilation_rates": (1, 2)}


@pytest.fixture(scope="module")
def catalogue():
    return discover().catalogue


def plan(catalogue, machine=CPU, **fields):
    return expand(catalogue, machine, run_request(catalogue, suite="model", **fields))


def running(planned):
    return {case.case.implementation for case in planned if case.skip is None}


pytestmark = pytest.mark.needs_extra("transformers")


def test_the_usual_rows_are_those_that_run_at_once_and_one_without_attention(catalogue):
    planned = plan(catalogue)
    assert running(planned) == {"sdpa-model", "dilabench-model", "identity-model"}
    (without,) = (case for case in planned if case.case.implementation == "identity-model")
    assert (without.role, without.case.workload.window) == ("yardstick", ITSELF)
    assert {case.case.workload.mode for case in planned} == {"both"}
    asked = plan(catalogue, run={"implementations": ["eager-model"]})
    assert running(asked) == {"eager-model", "identity-model"}


@pytest.mark.parametrize("preset", [preset.name for preset in MODELS])
def test_every_preset_is_planned_packed_and_not(catalogue, preset):
    for packed in (False, True):
        run = {"lengths": [8192, 32768], "options": {"packed": packed}}
        planned = plan(catalogue, HOPPER, configs=[preset], run=run)
        assert {case.case.workload.model.name for case in planned} == {preset}
        assert {case.case.workload.seq_len for case in planned} == {8192, 32768}
        assert {len(case.case.workload.sequences) > 1 for case in planned} == {packed}


@pytest.mark.parametrize("preset", ["gpt_oss_layer", "gemma2_layer", "gpt_oss_tiny"])
def test_where_sdpa_is_refused_eager_attention_is_the_plain_row(catalogue, preset):
    planned = plan(catalogue, configs=[preset], workload={"dtype": "float32"})
    assert running(planned) == {"eager-model", "dilabench-model", "identity-model"}
    assert {case.case.implementation for case in planned if case.role == "plain" and case.skip is None} == {
        "eager-model"
    }
    (why,) = (case.skip.why for case in planned if case.case.implementation == "sdpa-model")
    assert "transformers refuses sdpa for this model" in why
    eager = next(case.case for case in planned if case.skip is None)
    seconds = [second.name for second, _ in second_implementations(eager, catalogue, CPU)]
    assert seconds == ["eager-model", "eager-rows-model"]


@pytest.mark.parametrize(("fields", "count"), [({}, 4), ({"batch_size": 2}, 2)])
def test_a_padded_batch_has_sequences_of_other_lengths(catalogue, fields, count):
    planned = plan(catalogue, workload={"mode": "generate", **fields}, run={"options": {"padded": True}})
    (lengths,) = {case.case.workload.model.lengths for case in planned}
    assert len(lengths) == len(set(lengths)) == count
    assert {case.case.workload.seq_len for case in planned} == {max(lengths)}
    assert {case.case.workload.batch_size for case in planned} == {count}


def test_a_pattern_is_another_function_shown_beside(catalogue):
    planned = plan(catalogue, workload=DILATED)
    dilated = [case for case in planned if case.case.workload.pattern != DENSE]
    assert [(case.case.implementation, case.role) for case in dilated] == [("dilabench-model", "yardstick")]
    assert running(planned) == {"sdpa-model", "dilabench-model", "identity-model"}


def test_other_suites_leave_models_out(catalogue):
    planned = expand(catalogue, CPU, run_request(catalogue, suite="implementations"))
    assert not any(case.takes == "model" for case in planned)
    named = run_request(catalogue, suite="implementations", run={"implementations": ["sdpa-model"]})
    (case,) = expand(catalogue, CPU, named)
    assert "`dilabench run model`" in case.skip.why


def test_modes_have_the_names_of_steps(catalogue):
    for name, mode in (("train", "both"), ("prefill", "forward")):
        assert {case.case.workload.mode for case in plan(catalogue, workload={"mode": name})} == {mode}


def test_generating_is_a_prefill_and_the_tokens_after_it(catalogue):
    planned = plan(catalogue, workload={"mode": "generate"})
    steps = {(case.case.workload.mode, case.case.workload.query_len) for case in planned}
    assert steps == {("forward", None), ("forward", 1)}
    with pytest.raises(ConfigError, match="--packed: packed documents fill no cache"):
        plan(catalogue, workload={"mode": "generate"}, run={"options": {"packed": True}})
    with pytest.raises(ConfigError, match="--padded and --packed: packed documents have no padding"):
        plan(catalogue, run={"options": {"packed": True, "padded": True}})
    with pytest.raises(ConfigError, match="'generate' is two workloads of a model, which suite `model` plans"):
        expand(catalogue, CPU, run_request(catalogue, suite="implementations", workload={"mode": "generate"}))


def test_without_transformers_the_way_out_is_named(catalogue, monkeypatch):
    monkeypatch.setattr(type(catalogue), "find_module", lambda *_: None)
    with pytest.raises(EnvironmentNotReady, match=r"pip install 'dilabench\[transformers\]'"):
        plan(catalogue)


def test_other_workloads_and_projects_are_refused(catalogue):
    planned = plan(catalogue, configs=["longnet_32k"], run={"options": {"padded": True}})
    assert all("the workload has none" in case.skip.why for case in planned if case.takes == "model")
    model = {"source": "longnet", "project": "unheard_of", "layers": 2, "width": 64, "vocabulary": 128}
    with pytest.raises(ConfigError, match="'unheard_of' builds no models here; use torchscale"):
        plan(catalogue, workload={"model": model})


def test_torchscales_models_say_how_to_get_it(catalogue, monkeypatch):
    monkeypatch.setattr(type(catalogue), "find_module", lambda *_: None)
    planned = plan(catalogue, HOPPER, configs=["gigapath_encoder"])
    names = {"torchscale-model", "torchscale-dilabench-model", "torchscale-identity-model"}
    assert {case.case.implementation for case in planned} == names
    assert all("git clone https://github.com/microsoft/torchscale" in case.skip.why for case in planned)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}


CONFIG_OF_MODEL = {"source": "llama", "layers": 2, "width": 64, "vocabulary": 128}


def test_a_folder_gives_the_sizes_and_heads_of_its_model(catalogue, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    workload = workload_request(catalogue, None, {"model": str(tmp_path), "seq_len": 64}).resolve("float32")
    assert (workload.num_heads, workload.num_kv_heads, workload.head_dim) == (4, 2, 16)
    assert (workload.model.width, workload.model.layers, workload.model.vocabulary) == (64, 2, 128)
    assert workload.pattern == DENSE
    assert workload.model.name == tmp_path.name


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("./no_such_folder", "'./no_such_folder' has no readable config.json"),
        ("module:function", "layers"),
        ({"source": "llama", "layers": 0, "width": 64, "vocabulary": 128}, "layers"),
    ],
)
def test_a_model_without_its_sizes_is_refused(catalogue, model, reason):
    with pytest.raises(ConfigError, match=reason):
        workload_request(catalogue, None, {"model": model})


def test_a_model_stays_the_same_in_a_record(catalogue):
    workload = workload_request(catalogue, "llama_1b", {}).resolve("float32")
    assert type(workload).model_validate_json(workload.model_dump_json()) == workload
    assert "model" not in workload.replace(model=None).model_dump()
    assert workload.model.model_dump().keys() & {"sdpa", "lengths"} == set()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lengths": (64,)}, "one for each of its 2 sequences"),
        ({"lengths": (64, 65)}, "at most seq_len=64"),
        ({"lengths": (64, 4)}, "at least 5"),
    ],
)
def test_lengths_that_do_not_fit_a_padded_batch_are_refused(catalogue, fields, reason):
    model = {**CONFIG_OF_MODEL, **fields}
    asked = workload_request(catalogue, None, {"model": model, "seq_len": 64, "batch_size": 2, "query_len": 4})
    with pytest.raises(ConfigError, match=reason):
        asked.resolve("float32")


@pytest.fixture
def without_attention_ns():
    return 20e6


@pytest.fixture
def fields():
    return {}


@pytest.fixture
def record(catalogue, make_row, make_record, without_attention_ns, fields):
    """Steps of 100 ms with SDPA, 40 ms with dilabench, and 20 ms without attention."""
    workload = workload_request(catalogue, "llama_400m", {"seq_len": 32768, **fields}).resolve("float32")

    def row(name, ns, role="method", **changes):
        fields = dict(workload.replace(**changes))
        return make_row(name, backend=None, ns=ns, spread=0.001, role=role, takes="model", **fields)

    rows = [
        row("sdpa-model", 100e6, "plain"),
        row("dilabench-model", 40e6),
        row("identity-model", without_attention_ns, "yardstick", window=ITSELF),
    ]
    return make_record(rows, suite="model")


def test_the_answer_is_how_much_faster_and_the_share_of_attention(record):
    (section,) = analyse(record)
    assert section.answers
    assert section.sentence == (
        "llama_400m at 32K: `dilabench-model` makes a step 2.5 times as fast as `sdpa-model`; attention is 80 % of "
        "`sdpa-model`'s time, 50 % of `dilabench-model`'s."
    )
    assert [row[1] for row in section.rows] == ["dilabench-model", "sdpa-model", "identity-model"]
    (plot,) = section.plots
    assert plot.stacked
    rest, attention = (bars.values for bars in plot.bars)
    assert rest == pytest.approx((20, 20), rel=0.01)
    assert attention == pytest.approx((80, 20), rel=0.01)


@pytest.mark.parametrize(
    ("fields", "does"),
    [
        ({"mode": "prefill"}, "gives the first token"),
        ({"mode": "prefill", "query_len": 1}, "gives a token"),
        ({"mode": "prefill", "layout": "packed", "batch_size": 1}, "makes a forward pass"),
    ],
    ids=str,
)
def test_a_step_that_generates_is_named_by_its_token(record, does):
    (section,) = analyse(record)
    assert f"`dilabench-model` {does} 2.5 times as fast as `sdpa-model`; attention is 80 %" in section.sentence


@pytest.mark.parametrize("without_attention_ns", [101e6])
def test_where_launches_are_the_limit_no_share_is_shown(record):
    (section,) = analyse(record)
    assert section.sentence == "llama_400m at 32K: `dilabench-model` makes a step 2.5 times as fast as `sdpa-model`."
    assert {row[section.columns.index("of it attention")] for row in section.rows} == {ABSENT}


def test_no_rate_of_attention_alone_is_shown_of_a_step(record):
    assert "not comparable with the rows above" not in to_text(record, [])
    lines = [line for table in workload_tables(record) for line in table.rows]
    assert {COLUMNS["TFLOP/s"].text(line) for line in lines} == {ABSENT}
    assert ABSENT not in {COLUMNS["tok/s"].text(line) for line in lines}


@pytest.mark.slow
def test_a_user_measures_a_model_of_a_folder(tmp_path, monkeypatch, known_ceilings):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    record = dilabench.run("model", model=str(tmp_path), lengths=[96], mode="train", timing="simple", device="cpu")
    assert {row.outcome.status for row in record.rows if row.case.implementation != "flash2-model"} == {"measured"}


def test_llama_tiny_runs_on_a_cpu(tmp_path, monkeypatch, known_ceilings):
    monkeypatch.chdir(tmp_path)
    names = [f"{name}-model" for name in ("sdpa", "dilabench", "identity")]
    fields = {"lengths": [96], "packed": True, "timing": "simple", "device": "cpu"}
    record = dilabench.run("model", implementations=names, **fields)
    rows = {row.case.implementation: row.outcome for row in record.rows}
    assert [rows[name].status for name in names] == ["measured"] * 3
    assert rows["dilabench-model"].verification.passed
    assert rows["dilabench-model"].verification.timed_calls
