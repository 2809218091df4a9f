"""Bad input: each ends with its exit code and a text with the value, the rule and a way out; nothing is written."""

import json
from pathlib import Path

import pytest

WRONG = [
    ("run quik", "unknown suite 'quik'; did you mean quick"),
    ("run quick -i stridet", "unknown implementation 'stridet'; did you mean strided"),
    ("run quick --implementations dilated improvd", "unknown implementation 'improvd'; did you mean improved"),
    ("run quick -b sdpaflash", "unknown backend 'sdpaflash'; did you mean sdpa-flash"),
    ("run quick --config medum", "unknown workload 'medum'; did you mean medium"),
    ("run quick --range produktion", "unknown range 'produktion'; did you mean production"),
    ("run quick --range custom", "range 'custom' has no lengths; write for example --range custom --lengths 2K,4K,8K"),
    ("run quick --range book --lengths 2K", "range 'book' fixes its lengths but 2048 are given too"),
    ("run quick --lengths 2K --custom-lengths 4K", "--lengths and --custom-lengths mean the same; give one of them"),
    (
        "run quick --set segment_lengths=1K,2K --set dilation_rates=1",
        "2 segment lengths [1024, 2048] but 1 dilation rates [1]",
    ),
    ("run quick --seq-length 0", "seq_len '0' must be at least 1"),
    ("run quick --seq-length -5", "seq_len '-5' must be at least 1"),
    ("run quick --seq-length abc", "seq_len 'abc' is not a number; write a whole number such as 4096, 4K or 1M"),
    ("run quick --batch-size 99999999999999999999", "above 2^48"),
    ("run quick --num-heads 99999", "num_heads 99999 should be less than or equal to 16384"),
    ("run quick --num-heads 1.5", "num_heads '1.5' is not a whole number; 1 or 2 would be"),
    ("run quick --head-dim 0", "head_dim '0' must be at least 1"),
    ("run quick --sequence-lengths 1K zwei", "length 'zwei' is not a number"),
    ("run quick --lengths 2K,2048", "[2048, 2048] repeats 2048; give each length once"),
    ("run quick --lengths 2K --seq-length 4K", "seq_len=4096 and lengths [2048] are both given; leave one out"),
    (
        "run quick --num-heads 12 --num-kv-heads 5",
        "num_heads=12 is not a multiple of num_kv_heads=5; num_kv_heads may be 1, 2, 3",
    ),
    ("run quick --dtype int8", "dtype 'int8' should be 'float64'"),
    ("run quick --mode sideways", "mode 'sideways' should be 'forward', 'backward' or 'both'"),
    ("run quick --set seqlen=5", "seqlen: unknown key; did you mean seq_len?"),
    ("run quick --set seq_len", "--set 'seq_len' has no 'key='; write for example --set seq_len=4096"),
    ("run quick --set seq_len=5 --seq-length 6", "seq_len is given twice: '6' and, by --set, 5; leave one out"),
    ("run quick --config none.toml", "config file 'none.toml' cannot be read: No such file"),
    ("run quick --budget soon", "duration 'soon' is not a positive time; write for example 30s"),
    ("run quick --budget 0s", "duration '0s' is not a positive time"),
    ("run quick --timing warmupp", "unknown timing 'warmupp'; did you mean warmup"),
    (
        "run quick --tokens 5",
        "suite 'quick' has no option 'tokens' (given as '5'); suite billion has it: `dilabench run billion`",
    ),
    ("run quick --memory-limit 1G", "suites extreme and billion have it: `dilabench run extreme`, or leave it out"),
    ("run ring --sharding insid", "sharding 'insid' should be 'inside' or 'outside'"),
    ("run extreme --max-seq-length x", "max_seq_length 'x' is not a number"),
    ("run quick --nproc 0", "nproc 0 should be greater than or equal to 1"),
    ("run quick -f markdwn", "unknown reporter 'markdwn'; did you mean markdown"),
    ("run quick --resume nowhere", "'nowhere'"),
    ("run quick --device cuda:1", "device 'cuda:1' must be auto, cpu, cuda or the name of another, with no number"),
    ("list implementatins", "'implementatins' is not one of 'patterns'"),
    ("plugin new mine --kind sort", "'--kind' / '-k': 'sort' is not one of 'implementation'"),
    ("run", "SUITE, the question, is missing; write for example `dilabench run quick`"),
    ("report", "Missing argument 'RUN'. A run's folder, run.json or id (`dilabench history`), or 'latest'"),
    ("compare", "RUN...'. Files, folders, ids (`dilabench history`), 'latest' or baselines."),
    ("compare latest", "one run is given; name two or more, BASE first ('latest', or ids of `dilabench history`)"),
    ("run quick --no-such-option", "No such option: --no-such-option"),
    ("plan --memory lots", "size 'lots' is not a number"),
    ("plan --memory 0", "size '0' must be at least 1"),
    ("verify stridet", "unknown implementation 'stridet'; did you mean strided"),
    ("verify --set rates=1", "rates: unknown key"),
    ("verify --config gqaa", "unknown workload 'gqaa'; did you mean gqa"),
    ("report nowhere", "'nowhere'"),
    ("report nowhere -f markdwn", "unknown reporter 'markdwn'; did you mean markdown"),
    ("describe nothing-of-that-kind", "unknown name 'nothing-of-that-kind'"),
    ("frobnicate", "No such command 'frobnicate'"),
]


@pytest.mark.parametrize(("command", "text"), WRONG, ids=[command for command, _ in WRONG])
def test_a_bad_request_is_refused(cli, command, text):
    result = cli(*command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert "Value error" not in result.stderr, "the words of a library, not of ours"
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize(
    ("command", "text"),
    [(command, text) for command, text in WRONG if not {"plugin", "-f"}.intersection(command.split())],
)
def test_with_json_a_refusal_is_an_object(cli, command, text):
    result = cli(*command.split(), "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["name"]) == (2, "bad_request")
    assert text in error["text"]
    assert text in " ".join(result.stderr.split()), "for people, as ever"


@pytest.mark.parametrize(
    ("command", "code", "way_out"),
    [
        ("run quick --device cuda", 3, "use --device cpu or auto"),
        ("run quick -i fused --device cpu", 8, "-i gather,strided would run here"),
        (
            "check --against main",
            2,
            "`dilabench run quick` makes one, then `dilabench baseline save main` gives it this name",
        ),
        (
            "compare one two",
            2,
            "`dilabench run quick` makes one, then `dilabench baseline save one` gives it this name",
        ),
        ("history nothing", 2, "`dilabench history` lists the runs"),
        ("check", 2, "see `dilabench check --help`"),
        ("run quick --no-such-option", 2, "see `dilabench run --help`"),
        ("run quick --causal", 2, "write instead: --set causal=true"),
    ],
)
def test_every_refusal_reaches_the_page_of_the_job_and_the_reader_of_json(
    cli, monkeypatch, tmp_path, command, code, way_out
):
    monkeypatch.setattr("dilabench.machine._nvml_gpus", lambda: ())
    page = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    has_page = command.partition(" ")[0] != "history"
    result = cli(*command.split(), "--json", *(["--github-summary"] if has_page else []))
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["code"], error["way_out"]) == (code, code, way_out)
    assert not has_page or f"### dilabench: exit code {code}\n\n```\nerror: {error['text']}\n```" in page.read_text()


def test_cuda_by_name_without_a_gpu_is_an_environment_error(cli, monkeypatch):
    monkeypatch.setattr("dilabench.machine._nvml_gpus", lambda: ())
    result = cli("run", "quick", "--device", "cuda")
    assert result.exit_code == 3
    assert "device 'cuda' cannot be used: no NVIDIA GPU is visible; use --device cpu or auto" in result.stderr


def test_a_device_that_is_not_there_is_an_environment_error(cli):
    result = cli("run", "quick", "--device", "xpu")
    assert result.exit_code == 3
    assert "device 'xpu' is not on this machine; use --device auto or one of: cpu" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[workload\nseq_len = 5\n", "is not valid TOML: "),
        ("[workload]\nseqlen = 5\n", "seqlen: unknown key; did you mean seq_len?"),
        ("[run]\nbudgett = '5s'\n", "budgett: unknown key; did you mean budget_s?"),
        ("[workload]\nseq_len = -3\n", "seq_len -3 must be at least 1"),
    ],
)
def test_a_wrong_toml_file_is_refused(cli, tmp_path, content, text):
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    result = cli("run", "quick", "--config", str(file))
    assert result.exit_code == 2
    assert text in result.stderr
    assert str(file) in result.stderr
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("command", "form"),
    [
        ("run quick --dry-run", "csv"),
        ("report latest", "table"),
        ("compare one two", "html"),
        ("check --against main", "markdown"),
        ("history", "html"),
        ("report one two", "html"),
    ],
)
def test_json_beside_another_format_is_refused(cli, command, form):
    result = cli(*command.split(), "--json", "-f", form)
    assert result.exit_code == 2
    assert f"--json and -f {form} each say what to print; leave one out" in " ".join(result.stderr.split())
    assert json.loads(result.stdout)["error"]["way_out"] == "leave one out"


def test_an_unexpected_error_says_where_to_report(cli, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("boom")

    monkeypatch.setattr("dilabench.suites.planner.expand", broken)
    result = cli("run", "quick", "--dry-run")
    assert result.exit_code == 1
    assert "internal error: RuntimeError: boom" in result.stderr
    assert "issue tracker" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("DILABENCH_DEBUG", "1")
    assert isinstance(cli("run", "quick", "--dry-run").exception, RuntimeError)


def test_strict_plugins_refuse_a_broken_one(cli, monkeypatch):
    class Broken:
        name = "theirs"
        dist = None

        def load(self):
            raise ImportError("No module named 'nowhere'")

    monkeypatch.delenv("DILABENCH_DISABLE_PLUGINS")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Broken()])
    monkeypatch.setattr("importlib.metadata.EntryPoint", Broken)
    assert cli("run", "quick", "--dry-run").exit_code == 0
    result = cli("run", "quick", "--dry-run", "--strict-plugins")
    assert result.exit_code == 3
    assert "plug-in 'theirs': ImportError: No module named 'nowhere'" in result.stderr
