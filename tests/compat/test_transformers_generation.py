"""Models of transformers that generate: every token has the logits of one eager pass over all tokens of its row."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs [test]: transformers is not installed")

from dilabench.compat import transformers as integration  # noqa: E402

NAME = "dilabench-generating"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # Scores of attention that differ by much.
    "initializer_range": 0.3,
}
WINDOW = 5
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}
PROMPT, NEW = 20, 64
LEFT = torch.ones(3, PROMPT, dtype=torch.long)
LEFT[0, :7] = LEFT[2, :2] = 0


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A call that torch computes is an error."""
    monkeypatch.setenv("DILABENCH_STRICT", "1")
    integration.register(NAME)
    yield
    for table in (integration.interface.ALL_ATTENTION_FUNCTIONS, integration.interface.ALL_MASK_ATTENTION_FUNCTIONS):
        del table._global_mapping[NAME]


def _model(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **MODELS[kind])
    if kind == "gpt_oss":
        config._experts_implementation = "eager"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.to(dtype).eval()


def _prompts(rows: int) -> Tensor:
    return torch.randint(1, 64, (rows, PROMPT), generator=torch.Generator().manual_seed(1))


def _generated(model: nn.Module, padding: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens [B, PROMPT + NEW] and the logits [B, NEW, V] that they were chosen by."""
    model.set_attn_implementation(NAME)
    device = next(model.parameters()).device
    out = model.generate(
        _prompts(len(padding)).to(device),
        attention_mask=padding.to(device),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits, 1)


def _whole(model: nn.Module, tokens: Tensor, padding: Tensor) -> Tensor:
    """The logits of NEW tokens, of an eager pass over each row without its padding."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = [
            model(row[None, int((seen == 0).sum()) : -1], use_cache=False).logits[0, -NEW:]
            for row, seen in zip(tokens, padding, strict=True)
        ]
    return torch.stack(rows)


def _check(kind: str, padding: Tensor, dtype: torch.dtype, device: str = "cpu", **options: Any) -> None:
    model = _model(kind, dtype).to(device)
    tokens, logits = _generated(model, padding, **options)
    expected = _whole(model, tokens, padding)
    # Norms of layers and the logits of `generate` are in float32.
    torch.testing.assert_close(logits, expected.float(), rtol=0, atol=1e-5 * expected.abs().max().item())
    assert torch.equal(tokens[:, PROMPT:], expected.argmax(-1))


PADDING = {"none": LEFT.new_ones(2, PROMPT), "left": LEFT}
FORMS: dict[str, dict[str, Any]] = {
    "static cache": {"cache_implementation": "static"},
    "prompt in chunks": {"prefill_chunk_size": 6},
}


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_the_whole_pass(kind: str, side: str, calls: list[dict[str, Any]]) -> None:
    _check(kind, PADDING[side], torch.float64)
    # Of both layers, for the prompt and for each later token.
    assert len(calls) == 2 * NEW


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("kind", MODELS)
def test_every_cache_and_prompt(kind: str, side: str, form: str) -> None:
    _check(kind, PADDING[side], torch.float64, **FORMS[form])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_drafted_tokens(kind: str) -> None:
    """Several queries at a time, and a cache from which rejected ones are cut."""
    _check(kind, PADDING["none"][:1], torch.float64, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("kind", MODELS)
def test_single_precision(monkeypatch: pytest.MonkeyPatch, kind: str, side: str, device: str) -> None:
    monkeypatch.setenv("DILABENCH_FIRST_USE", "0")
    _check(kind, PADDING[side], torch.float32, device)
