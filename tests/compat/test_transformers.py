"""dilabench in models of transformers: logits and gradients of their own attention, and clear refusals."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs [test]: transformers is not installed")

from dilabench.compat import transformers as integration  # noqa: E402
from dilabench.patterns import (  # noqa: E402
    DilatedPattern,
    NativeSparsePattern,
    SelectedBlocksPattern,
    TopKBlocksPattern,
    WindowSinkPattern,
)
from dilabench.patterns.pattern import Pattern  # noqa: E402
from tests.conftest import half_are_slow, slow  # noqa: E402

LONGNET = DilatedPattern(segment_lengths=(4, 8), dilation_rates=(1, 2))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
N = 20


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    integration.register()
    integration.register("dilabench-longnet", pattern=LONGNET)
    integration.interface._said.clear()
    yield
    for name in ("dilabench", "dilabench-longnet"):
        del integration.interface.ALL_ATTENTION_FUNCTIONS._global_mapping[name]
        del integration.interface.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]


def _config(model: str, **fields: Any) -> Any:
    kind = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[model]
    windows = WINDOW if model.startswith("qwen") else {}
    heads = {"head_dim": 8} if model == "qwen3" else {}
    return getattr(transformers, kind)(**SIZES, **windows, **heads, **fields)


def _pair(config: Any, other: str = "sdpa", name: str = "dilabench") -> tuple[nn.Module, nn.Module]:
    """The same model of random weights, in float64 and in training, by transformers' own attention and by dilabench."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    theirs = kind.from_config(copy.deepcopy(config), attn_implementation=other).double()
    ours = kind.from_config(copy.deepcopy(config), attn_implementation=name).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs.train(), ours.train()


def _step(model: nn.Module, **batch: Any) -> tuple[Tensor, list[Tensor]]:
    """The logits and the gradients of all parameters of a training step."""
    model.zero_grad()
    result = model(**batch)
    result.loss.backward()
    return result.logits, [p.grad.clone() for p in model.parameters()]


def _assert_same_step(theirs: nn.Module, ours: nn.Module, rows: Any = ..., **batch: Any) -> None:
    expected, found = _step(theirs, **batch), _step(ours, **batch)
    torch.testing.assert_close(found[0][rows], expected[0][rows], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-10)


def _ids(rows: int = 3) -> Tensor:
    return torch.randint(1, 64, (rows, N), generator=torch.Generator().manual_seed(1))


def _padding(side: str) -> Tensor:
    mask = torch.ones(3, N, dtype=torch.long)
    if side == "left":
        mask[0, :7] = mask[1, :2] = 0
    elif side == "right":
        mask[0, 7:] = mask[1, 18:] = 0
    elif side == "both":
        mask[0, :3] = mask[0, 18:] = mask[2, 1:] = 0
    return mask


@pytest.mark.parametrize("side", ["none", "left", "right", "both"])
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3"])
def test_padded_batches_have_sdpas_logits_and_gradients(model: str, side: str, calls: list[dict[str, Any]]) -> None:
    """The queries of a group share a key head, and every second layer of Qwen has a window of 5."""
    mask = _padding(side)
    labels = torch.where(mask.bool() & mask.roll(1, 1).bool(), _ids(), -100)
    given = {"attention_mask": mask} if side != "none" else {}
    _assert_same_step(*_pair(_config(model)), mask.bool(), input_ids=_ids(), labels=labels, **given)
    windows = [(-1, -1), (-1, -1) if model == "llama" else (4, -1)]
    assert [call["window"] for call in calls] == windows
    assert all(("cu_seqlens" in call) == (side != "none") for call in calls)


def _documents(*lengths: int, bounds: bool) -> dict[str, Any]:
    """What transformers' collator makes of documents of these lengths."""
    numbers = torch.Generator().manual_seed(2)
    documents = [{"input_ids": torch.randint(1, 64, (n,), generator=numbers).tolist()} for n in lengths]
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    batch: dict[str, Any] = collator(documents, return_tensors="pt")
    return batch


@pytest.mark.parametrize("bounds", [False, True], ids=["by position_ids", "by cu_seq_lens_q"])
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3"])
def test_packed_documents_have_sdpas_logits_and_gradients(
    model: str, bounds: bool, calls: list[dict[str, Any]]
) -> None:
    batch = _documents(1, 7, 12, 3, 19, bounds=bounds)
    _assert_same_step(*_pair(_config(model)), use_cache=False, **batch)
    assert [tuple(torch.as_tensor(call["cu_seqlens"]).tolist()) for call in calls] == [(0, 1, 8, 20, 23, 42)] * 2
    assert [call.get("max_seqlen") for call in calls] == [19 if bounds else None] * 2


def test_bounds_hold_where_a_cache_hides_restarting_positions() -> None:
    """transformers finds documents by their positions without a cache only."""
    theirs, ours = _pair(_config("qwen3"))
    batch = _documents(5, 9, 4, bounds=True)
    expected, found = _step(theirs, **batch, use_cache=False), _step(ours, **batch, use_cache=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_rows_of_a_batch_may_each_hold_documents() -> None:
    positions = torch.tensor([[*range(N)], [*range(6), *range(N - 6)], [0, *range(N - 2), 0]])
    batch = {"input_ids": _ids(), "labels": _ids(), "position_ids": positions, "use_cache": False}
    _assert_same_step(*_pair(_config("qwen3")), **batch)


def test_bounds_changed_in_place_are_read_again() -> None:
    _, ours = _pair(_config("llama"))
    batch = _documents(8, 12, bounds=True)
    ours(**batch)
    fresh = _documents(5, 15, bounds=True)
    batch["cu_seq_lens_q"].copy_(fresh["cu_seq_lens_q"])
    batch["cu_seq_lens_k"].copy_(fresh["cu_seq_lens_q"])
    changed = {**fresh, "input_ids": batch["input_ids"]}
    expected = ours(**changed)
    found = ours(**{**changed, "cu_seq_lens_q": batch["cu_seq_lens_q"], "cu_seq_lens_k": batch["cu_seq_lens_k"]})
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=0)


def test_sinks_are_those_of_eager_attention() -> None:
    config = transformers.GptOssConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
        experts_implementation="eager",
    )
    theirs, ours = _pair(config, "eager")
    mask = _padding("left")
    labels = torch.where(mask.bool() & mask.roll(1, 1).bool(), _ids(), -100)
    _assert_same_step(theirs, ours, mask.bool(), input_ids=_ids(), labels=labels, attention_mask=mask)


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eager attention, which asks for float32."""
    softmax = nn.functional.softmax

    def unrounded(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(nn.functional, "softmax", unrounded)


@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("model", ["Gemma2Config", "VaultGemmaConfig"])
def test_softcaps_are_those_of_eager_attention(model: str, side: str, calls: list[dict[str, Any]]) -> None:
    config = getattr(transformers, model)(
        **SIZES, head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=0.7, sliding_window=5
    )
    theirs, ours = _pair(config, "eager")
    for pair in (theirs, ours):
        # Scores of random weights are too small for a cap to matter.
        for name, weight in pair.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.data *= 20
    mask = _padding(side)
    labels = torch.where(mask.bool() & mask.roll(1, 1).bool(), _ids(), -100)
    _assert_same_step(theirs, ours, mask.bool(), input_ids=_ids(), labels=labels, attention_mask=mask)
    assert {call["softcap"] for call in calls} == {0.7}


@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("side", ["none", "left"])
def test_values_of_another_width_are_not_padded(side: str, calls: list[dict[str, Any]]) -> None:
    config = transformers.DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}),
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=2,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
    )
    theirs, ours = _pair(config, "eager")
    mask = _padding(side)
    labels = torch.where(mask.bool() & mask.roll(1, 1).bool(), _ids(), -100)
    _assert_same_step(theirs, ours, mask.bool(), input_ids=_ids(), labels=labels, attention_mask=mask)
    assert {call["value_dim"] for call in calls} == {12}


def test_encoders_are_not_causal(calls: list[dict[str, Any]]) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    config = transformers.ModernBertConfig(
        **sizes, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, reference_compile=False
    )
    torch.manual_seed(0)
    theirs = transformers.ModernBertModel._from_config(config, attn_implementation="sdpa").double().eval()
    ours = transformers.ModernBertModel._from_config(copy.deepcopy(config), attn_implementation="dilabench")
    ours.double().eval().load_state_dict(theirs.state_dict())
    mask = _padding("right")
    expected, found = (model(_ids(), attention_mask=mask).last_hidden_state for model in (theirs, ours))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-10, atol=1e-10)
    assert [call["causal"] for call in calls] == [False, False]
    assert [call["window"] for call in calls] == [(-1, -1), (4, 4)]


@pytest.mark.parametrize("form", ["packed", "left"])
def test_a_pattern_restarts_in_each_document(form: str, calls: list[dict[str, Any]]) -> None:
    """Each document alone gives the same logits."""
    _, ours = _pair(_config("llama"), name="dilabench-longnet")
    ours.eval()
    if form == "packed":
        batch = _documents(9, 12, bounds=True)
        (together,) = ours(**batch).logits
        ids, parts = batch["input_ids"], (slice(0, 9), slice(9, 21))
    else:
        mask = _padding("left")
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        together = ours(_ids(), attention_mask=mask, position_ids=positions).logits[0]
        ids, parts = _ids()[:1], (slice(7, N),)
    assert {call["pattern"] for call in calls} == {LONGNET}
    for part in parts:
        torch.testing.assert_close(together[part], ours(ids[:, part]).logits[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("other", [lambda row: row % 3, lambda row: 7], ids=["holes", "custom mask"])
def test_masks_that_are_not_computed_go_to_sdpa_and_are_said_once(
    other: Callable[[int], int], caplog: pytest.LogCaptureFixture, calls: list[dict[str, Any]]
) -> None:
    theirs, ours = _pair(_config("qwen3"))
    mask = torch.ones(3, N, dtype=torch.long)
    if other(4) == 1:
        mask[0, 8:10] = 0
    else:
        mask = torch.rand(3, 1, N, N, generator=torch.Generator().manual_seed(3)).gt(0.3) | torch.eye(N).bool()
    rows = mask.bool() if mask.ndim == 2 else ...
    with caplog.at_level(logging.WARNING, "dilabench"):
        for _ in range(2):
            expected, found = (model(_ids(), attention_mask=mask).logits[rows] for model in (theirs, ours))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert len([record for record in caplog.records if "scaled_dot_product" in record.message]) == 1
    # Holes only count where there is a window.
    assert len(calls) == (2 if mask.ndim == 2 else 0)


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_pattern_generates_with_a_cache_as_without(side: str) -> None:
    ours = _pair(_config("llama"))[1].eval()
    ours.set_attn_implementation("dilabench-longnet")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": _padding(side)}
    with_cache, without = (ours.generate(_ids(), **options, use_cache=cached) for cached in (True, False))
    assert torch.equal(with_cache, without)


def _call(module: Any = None, name: str = "dilabench", **options: Any) -> Any:
    q, k, v = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    function = integration.interface.ALL_ATTENTION_FUNCTIONS[name]
    return function(nn.Module() if module is None else module, q, k, v, options.pop("attention_mask", None), **options)


@pytest.mark.parametrize(
    ("options", "name", "message"),
    [
        ({"dropout": 0.1}, "dilabench-longnet", "dropout 0.1 .* with pattern dilated"),
        ({"dropout": 0.1, "sliding_window": 3}, "dilabench", "dropout 0.1 .* with sliding_window 3"),
        ({"dropout": 0.1, "cu_seq_lens_q": torch.tensor([0, 2, 6])}, "dilabench", "dropout 0.1 .* with cu_seq_lens_q"),
        ({"attention_mask": torch.ones(1, 1, 6, 6).bool()}, "dilabench-longnet", "attention_mask is a tensor"),
        ({"position_bias": torch.zeros(1, 4, 6, 6)}, "dilabench-longnet", "position_bias"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])},
            "dilabench",
            "cu_seq_lens_k differs",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_sdpa_lacks_too_is_refused(options: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(name=name, **options)


@pytest.mark.parametrize("keyword", ["sinks", "head_mask", "score_mod", "a_later_keyword"])
def test_unknown_keywords_are_refused_by_name(keyword: str) -> None:
    module = _pair(_config("llama"))[1].model.layers[0].self_attn
    with pytest.raises(ValueError, match=f"LlamaAttention of llama: keyword {keyword} may change what attention"):
        _call(module, **{keyword: torch.zeros(1)})
    expected, found = _call(module), _call(module, **{keyword: None, "position_ids": torch.arange(6)})
    assert found[0].shape == expected[0].shape


def _selected_mask(indices: Tensor, block_size: int, length: int) -> Tensor:
    """bool [B, K, N, N] of indices [B, K, N, S] of blocks."""
    chosen = (torch.arange(length) // block_size == indices[..., None]).any(-2)
    return chosen & torch.ones(length, length).tril().bool()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 5])
def test_what_a_model_selects_is_what_it_attends_to(
    block_size: int, sinks: bool, calls: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Per token (DSA) and per block (MSA); blocks that no kernel takes go to torch, with the selection."""
    torch.manual_seed(0)
    length = 40
    q = torch.randn(2, 4, length, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, length, 8, dtype=torch.float64) for _ in range(2))
    module = nn.Module()
    module.num_key_value_groups = 2
    module.indexer = nn.Module()
    module.indexer.block_size = block_size
    own = torch.arange(length)[:, None] // block_size
    if block_size == 1:
        drawn = torch.randint(0, length, (2, length, 5))
        options = {"indices": torch.cat([own.expand(2, -1, -1), drawn], -1)}
        visible = _selected_mask(options["indices"][:, None].expand(-1, 4, -1, -1), 1, length)
    else:
        drawn = torch.randint(-1, length // block_size, (2, 2, length, 1))
        options = {"block_indices": torch.cat([own.expand(2, 2, -1, -1), drawn], -1)}
        visible = _selected_mask(options["block_indices"].repeat_interleave(2, 1), block_size, length)
    sink = torch.randn(4, dtype=torch.float64) if sinks else None
    found, _ = integration.interface.ALL_ATTENTION_FUNCTIONS["dilabench"](module, q, k, v, None, s_aux=sink, **options)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(2, -1, length, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    torch.testing.assert_close(found, (weights @ v.repeat_interleave(2, 1)).transpose(1, 2))
    assert len(calls) == (block_size != 5)
    assert ("selects blocks of 5 keys" in caplog.text) == (block_size == 5)


def test_block_indices_without_a_size_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_indices \(1, 2, 6, 1\) need .*block_size, which is None"):
        _call(block_indices=torch.zeros(1, 2, 6, 1, dtype=torch.long))


def test_a_fallback_is_said_once_for_each_model(caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.rand(3, 1, N, N, generator=torch.Generator().manual_seed(3)).gt(0.3) | torch.eye(N).bool()
    for model in (_pair(_config("llama"))[1], _pair(_config("llama"))[1]):
        for _ in range(2):
            model(_ids(), attention_mask=mask)
    said = [record.message for record in caplog.records if record.name == "dilabench.compat.transformers"]
    assert len(said) == 2
    assert "LlamaAttention of llama: attention_mask is a tensor, bool (3, 1, 20, 20)" in said[0]


def test_a_fallback_is_an_error_if_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILABENCH_STRICT", "1")
    _, ours = _pair(_config("llama", attention_dropout=0.5))
    with pytest.raises(ValueError, match=r"LlamaAttention of llama: dropout 0\.5 .*; DILABENCH_STRICT=1 makes this an"):
        ours(_ids())


@pytest.mark.parametrize("strict", [False, slow(True)])
def test_a_fallback_of_a_compiled_model_is_said(
    strict: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, positions that restart are documents, which a graph that is compiled hides."""
    if strict:
        monkeypatch.setenv("DILABENCH_STRICT", "1")
    _, ours = _pair(_config("llama"))
    torch._dynamo.reset()
    compiled = torch.compile(ours.eval(), backend="eager")
    reason = "torch.compile hides whether position_ids restart"
    if strict:
        with pytest.raises(ValueError, match=reason):
            compiled(_ids(), use_cache=False)
    else:
        expected = ours(_ids(), use_cache=False).logits
        torch.testing.assert_close(compiled(_ids(), use_cache=False).logits, expected, rtol=1e-10, atol=1e-10)
        assert caplog.text.count(reason) == 1
    torch._dynamo.reset()


def test_the_refusal_of_an_unknown_name_lists_ours() -> None:
    _, ours = _pair(_config("llama"))
    with pytest.raises(ValueError, match=r"attn_implementation=sdpa.* dilabench added .*'dilabench'"):
        ours.set_attn_implementation("dilabnch")


@pytest.mark.parametrize(
    ("kind", "length"), half_are_slow(["bart", "mbart", "pegasus", "marian", "blenderbot", "plbart"], [7, 8, 9])
)
def test_padding_of_an_encoder_hides_no_rows_of_the_decoder(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many decoder as encoder tokens are two sequences nevertheless. No call is torch's."""
    monkeypatch.setenv("DILABENCH_STRICT", "1")
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50, "d_model": 32, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, decoder_start_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).double().eval()
    padding = torch.ones(2, 8, dtype=torch.long)
    padding[0, 5:] = padding[1, :2] = 0
    batch = {"input_ids": _ids(2)[:, :8] % 48 + 1, "decoder_input_ids": _ids(2)[:, :length] % 48 + 1}
    found = {}
    for name in ("eager", "dilabench"):
        model.set_attn_implementation(name)
        found[name] = model(**batch, attention_mask=padding, use_cache=False).logits
    torch.testing.assert_close(found["dilabench"], found["eager"], rtol=1e-10, atol=1e-10)


def test_padding_with_bounds_is_refused() -> None:
    _, ours = _pair(_config("llama"))
    batch = _documents(8, 12, bounds=True)
    with pytest.raises(ValueError, match="padding, and cu_seq_lens_q"):
        ours(**batch, attention_mask=_padding("left")[:1])


def test_dropout_goes_to_sdpa(calls: list[dict[str, Any]]) -> None:
    """With the window and the padding of the mask."""
    theirs, ours = _pair(_config("qwen3", attention_dropout=0.5))
    results = []
    for model in (theirs, ours):
        torch.manual_seed(4)
        results.append(model(_ids(), attention_mask=_padding("left")).logits[_padding("left").bool()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert not calls


def test_values_may_be_narrower_than_keys() -> None:
    """As in multi-head latent attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 8)
    out, weights = integration.interface.ALL_ATTENTION_FUNCTIONS["dilabench"](nn.Module(), q, k, v, None, scaling=0.3)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert weights is None


def test_a_compiled_model_takes_any_packing_in_one_graph() -> None:
    _, ours = _pair(_config("qwen3"))
    ours.eval()
    graphs = 0

    def counted(graph: Any, _inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours.forward, backend=counted, fullgraph=True)
    for lengths in ((9, 12), (20, 1), (3, 18)):
        batch = {**_documents(*lengths, bounds=True), "use_cache": False}
        batch.pop("labels")
        torch.testing.assert_close(compiled(**batch).logits, ours(**batch).logits, rtol=1e-10, atol=1e-10)
    assert graphs == 1
    torch._dynamo.reset()


def test_windows_with_sinks_restart_in_each_document() -> None:
    integration.register("dilabench-longnet", pattern=WindowSinkPattern(sinks=1, window_size=4))
    _, ours = _pair(_config("llama"), name="dilabench-longnet")
    batch = _documents(9, 12, bounds=True)
    (together,) = ours(**batch).logits
    for part in (slice(0, 9), slice(9, 21)):
        alone = ours(batch["input_ids"][:, part]).logits[0]
        torch.testing.assert_close(together[part], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2", 3])
def test_refuses_to_replace_attention_of_transformers(name: Any) -> None:
    with pytest.raises(ValueError, match="must be a text and none of transformers' own"):
        integration.register(name)


STAND_INS = (SelectedBlocksPattern(), TopKBlocksPattern(selector="pooled"), NativeSparsePattern())


@pytest.mark.parametrize("pattern", STAND_INS, ids=lambda pattern: pattern.kind)
def test_refuses_patterns_that_need_more_than_a_model_gives(pattern: Pattern) -> None:
    with pytest.raises(ValueError, match=f"pattern {pattern.kind} .* stand-ins"):
        integration.register("dilabench-stand-ins", pattern=pattern)


def test_refuses_what_is_no_pattern() -> None:
    with pytest.raises(ValueError, match=r"pattern 'dilated' must be an object of dilabench\.patterns"):
        integration.register("dilabench-longnet", pattern="dilated")  # type: ignore[arg-type]
