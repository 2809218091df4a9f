"""Families of transformers' models: every cell of the matrix of docs/reference/models.md is equal or refused by name.

By default eight families, in the slow set thirty, one of each architecture of attention.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="needs [test]: transformers is not installed")

from dilabench.compat.transformers import interface  # noqa: E402

FEW = (
    "causal llama",
    "causal gpt_oss",
    "causal gemma4_text",
    "causal deepseek_v32",
    "causal minimax_m3_vl_text",
    "encoder modernbert",
    "encoder esmc",
    "encoder-decoder bart",
)
MANY = (
    *("causal afmoe", "causal bart", "causal biogpt", "causal cohere2", "causal deepseek_v3", "causal deepseek_v4"),
    *("causal doge", "causal gemma2", "causal gemma3_text", "causal glm_moe_dsa", "causal gpt2", "causal granite_swa"),
    *("causal inkling_text", "causal llama4_text", "causal mistral", "causal mixtral", "causal phi3", "causal qwen2"),
    *("causal qwen3", "causal qwen3_moe", "causal stablelm", "causal starcoder2", "encoder albert", "encoder bert"),
    *("encoder electra", "encoder-decoder marian", "encoder-decoder mbart", "encoder-decoder pegasus"),
    *("encoder-decoder t5", "encoder-decoder t5gemma"),
)


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    path = Path(__file__).parents[2] / "scripts" / "model_matrix.py"
    spec = importlib.util.spec_from_file_location("model_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "model_matrix", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(interface, "_fall_back", interface._fall_back)
    yield module
    for table in (interface.ALL_ATTENTION_FUNCTIONS, interface.ALL_MASK_ATTENTION_FUNCTIONS):
        table._global_mapping.pop(module.NAME, None)


def _check(matrix: Any, name: str, forms: tuple[str, ...]) -> None:
    (family,) = (x for x in matrix.families() if f"{x.kind} {x.model_type}" == name)
    row = matrix.row_of(family, forms)
    assert not isinstance(row, str), row
    wrong = {form: cell for form, cell in row.items() if cell.outcome not in ("equal", "refused", "n/a")}
    assert not wrong
    assert {row[form].outcome for form in ("plain", "gradients")} <= {"equal", "refused"}


@pytest.mark.parametrize("name", FEW)
def test_a_family_is_equal_to_eager_attention(matrix: Any, name: str) -> None:
    _check(matrix, name, tuple(form for form in matrix.FORMS if form != "compiled"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_every_form_of_a_family_is_equal_to_eager_attention(matrix: Any, name: str) -> None:
    _check(matrix, name, tuple(matrix.FORMS))


def test_a_difference_is_seen(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with another scale differs in every form that calls it."""
    attention = interface.attention
    monkeypatch.setattr(
        interface, "attention", lambda *tensors, **options: attention(*tensors, **options | {"scale": 0.1})
    )
    (family,) = (x for x in matrix.families() if (x.kind, x.model_type) == ("causal", "llama"))
    row = matrix.row_of(family, ("plain", "padded left", "packed", "gradients"))
    assert {form: cell.outcome for form, cell in row.items()} == dict.fromkeys(row, "differs"), row


def test_the_page_names_every_family_once(matrix: Any) -> None:
    families = matrix.families()
    rows = dict.fromkeys(families[1:], "not built: reason") | {families[0]: {"plain": matrix.Cell("equal")}}
    lines = matrix.page(rows).splitlines()
    named = [line for line in lines if line.startswith("| ") and line.endswith("not built: reason |")]
    assert len(named) == len(families) - 1
    assert f"| {families[0].model_type} | = | not run |" in "\n".join(lines)
