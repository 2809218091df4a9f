"""Which way the backward pass goes on Hopper, against what both ways took on an H100."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: dilabench.kernels needs it")

from dilabench.kernels.fused import backward_at_once
from dilabench.kernels.fused.backward import fused_backward
from dilabench.kernels.fused.backward_at_once import groups_at_once
from dilabench.kernels.fused.residue_plan import residue_plan
from dilabench.kernels.launch_cache import Launch, LaunchCache

FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "h100-backward-at-once.json"


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_at_once, "on_hopper", lambda _: True)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def is_at_once(row: dict[str, Any]) -> bool:
    shape = (row["tokens"], row["heads"], row["kv_heads"], row["causal"])
    plan = residue_plan(tuple(row["segments"]), tuple(row["rates"]), *shape, separate=row["apart"])
    q, k = (
        torch.empty(1, row["tokens"], heads, row["head_dim"], dtype=torch.bfloat16, device="meta")
        for heads in (row["heads"], row["kv_heads"])
    )
    return bool(groups_at_once(plan, q, k))


@pytest.mark.parametrize("drawn", ["first", "afterwards"])
def test_the_way_that_is_taken_is_nearly_always_the_faster_one(drawn: str) -> None:
    rows = [row for row in json.loads(FIGURES.read_text())["random_plans"]["rows"] if row["drawn"] == drawn]
    assert len(rows) > 100
    lost = [
        row["at_once_ms" if is_at_once(row) else "two_passes_ms"] / min(row["at_once_ms"], row["two_passes_ms"])
        for row in rows
    ]
    assert mean(lost) < 1.02, sorted(lost)[-10:]
    assert sum(ratio > 1.1 for ratio in lost) < len(rows) / 10


def test_rows_that_no_branch_covers_do_not_count() -> None:
    """Each head of the last branch sees one class of sixteen: few programs with long lists, no short lists."""
    segments, rates = (1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16)
    plan = residue_plan(segments, rates, 70001, 16, 16, False, separate=True)
    assert [group.covered_keys for group in plan.groups] == [1 / rate for rate in rates]
    q = torch.empty(1, 70001, 16, 48, dtype=torch.float16, device="meta")
    assert len(groups_at_once(plan, q, q)) == 5


def test_heads_that_share_keys_cover_what_any_of_them_does() -> None:
    by_head = residue_plan((64,), (4,), 256, 8, 2, False).groups[0]
    by_kv_head = residue_plan((64,), (4,), 256, 8, 2, False, offset_by="kv_head").groups[0]
    assert (by_head.covered_keys, by_kv_head.covered_keys) == (1, 1 / 4)


def test_the_heaviest_items_of_all_heads_go_first_where_the_cache_holds_what_they_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a second branch an eighth of the tokens."""
    n, heads, dim = 2048, 2, 64
    plan = residue_plan((256, n), (1, 8), n, heads, heads, True, cut=((0,), (1,)))
    q = torch.zeros(1, n, heads, dim, dtype=torch.float16)
    monkeypatch.setattr(backward_at_once, "L2_RESIDENT_BYTES", 2 * q.numel() * q.element_size() // 4)
    monkeypatch.setattr(backward_at_once, "_is_faster", lambda *_: True)
    noted: list[Launch] = []
    fused_backward(q, q, q, q, q, torch.zeros(1, heads, n), plan, cache=LaunchCache(noted))
    arguments = [launch.arguments(False)[1] for launch in noted]
    assert [own["item_major"] for own in arguments if "item_major" in own] == [0, 1]
