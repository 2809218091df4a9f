"""`run --dry-run`: every case in full, and nothing run."""


def test_a_block_mask_is_told_in_full(cli):
    options = ("--set", "pattern=block_sparse", "--set", "mask=strided", "--density", "0.2", "--block-size", "64")
    result = cli("run", "implementations", "-i", "block-sparse", *options, "--seq-length", "4K", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "block_sparse strided, block 64, density 20.0% requested, 20.1% reached" in " ".join(result.stdout.split())


def test_what_a_mask_lies_over_is_told_too(cli, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    options = ("--set", "pattern=block_sparse", "--set", "mask=random", "--set", "per_head=true")
    branches = ("--set", "segment_lengths=1K,2K", "--set", "dilation_rates=1,2")
    result = cli("run", "implementations", "-i", "block-sparse", *options, *branches, "--seq-length", "4K", "--dry-run")
    told = " ".join(result.stdout.split())
    assert "a mask per head, over branches" in told
    assert "1024/1, 2048/2" in told


def test_other_patterns_are_told_by_their_kind(cli):
    result = cli("run", "quick", "-i", "strided", "--lengths", "1K", "--dry-run")
    assert " dilated " in result.stdout
    assert "Nothing was run" in result.stdout


def test_a_device_without_kernels_says_so(cli, monkeypatch):
    monkeypatch.setattr("dilabench.machine.accelerator", lambda: "mps")
    result = cli("run", "range", "--lengths", "1K", "--device", "mps", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "no kernel of dilabench is tuned for mps" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit() and "cases," not in line]
    assert {row[1]: row[-1] for row in rows} == {"dense": "yes", "gather": "no", "strided": "yes", "fused": "no"}
    assert {row[2] for row in rows} == {"sdpa*", "-"}


def test_queries_that_are_the_last_rows_are_given_by_option_set_and_file(cli, tmp_path):
    file = tmp_path / "workload.toml"
    file.write_text('[workload]\npattern = "dense"\nquery_len = "2K"\nseq_len = "64K"\n')
    dense = ("--set", "pattern=dense", "--seq-length", "64K")
    ways = (
        (*dense, "--query-len", "2K"),
        (*dense, "--set", "query_len=2048"),
        ("--config", str(file)),
        ("--set", "pattern=dense", "--set", "batch=1q2ks64k"),
    )
    results = [cli("run", "implementations", "-i", "dense", *way, "--dry-run") for way in ways]
    assert [result.exit_code for result in results] == [0] * 4, results
    assert all("1x2K of 64K H8 D64" in result.stdout for result in results)
    assert len({result.stdout for result in results}) == 1


def test_wrong_numbers_of_queries_are_refused_with_the_rule(cli):
    def said(*arguments):
        result = cli("run", "implementations", "-i", "dense", "--dry-run", *arguments)
        assert result.exit_code == 2, result.output
        return " ".join(result.stderr.split())

    assert "query_len '0' must be at least 1" in said("--query-len", "0")
    assert "query_len 3072 is more than seq_len 1024: the queries are the last rows of their keys" in said(
        "--query-len", "3K", "--seq-length", "1K"
    )
    assert "packed sequences have a query at every position" in said(
        "--query-len", "1", "--set", "layout=packed", "--seq-length", "1K"
    )
