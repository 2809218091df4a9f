"""Steps of models: the attentions of the suite are right, and near misses of them are refused."""

import pytest
import torch

from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import CaseSpec, SecondSpec
from dilabench.engine.verify.case_verifier import CaseVerifier
from dilabench.plugins.builtin.model_presets import MODELS
from dilabench.plugins.builtin.models import MODEL_STEPS
from dilabench.record import Case
from dilabench.workload.model import ITSELF
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import slow

pytestmark = pytest.mark.needs_extra("transformers")

CPU = torch.device("cpu")
PRESETS = {preset.name: preset.fields for preset in MODELS}
LLAMA = {"source": "llama", "layers": 3, "width": 64, "inner": 96, "vocabulary": 256}
WINDOWED = {**LLAMA, "source": "mistral", "options": {"sliding_window": 40}}
PACKED = {"layout": "packed", "cu_seqlens": (0, 50, 51, 130)}
GENERATED = {"mode": "forward", "query_len": 1}
PADDED = {"batch_size": 2, "model": {**LLAMA, "lengths": (93, 130)}}
GPT_OSS = {"model": PRESETS["gpt_oss_tiny"]["model"]}
GEMMA2 = {name: PRESETS["gemma2_tiny"][name] for name in ("model", "softcap")}


def verified(target, model=LLAMA, **fields):
    """The verification of a step of a small Llama, or of the model in the fields."""
    shape = {"batch_size": 1, "seq_len": 130, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mode": "both"}
    workload = WorkloadRequest(**{"model": model, **shape, "dtype": "float32", **fields}).resolve("float32")
    case = Case(implementation="own", workload=workload)
    rival = "eager-rows-model" if workload.model.sdpa is False else "sdpa-model"
    seconds = tuple(SecondSpec(name=name, target=target_of(name)) for name in ("eager-model", rival))
    spec = CaseSpec(case=case, target=target, takes="model", seconds=seconds, seed=3)
    verification, why = CaseVerifier(CPU).verify(PreparedCall(spec, CPU, InputStore(CPU)))
    return verification, why


def target_of(name):
    return next(model.target for model in MODEL_STEPS if model.name == name)


FORMS = [
    {},
    PACKED,
    pytest.param({"batch_size": 2}, marks=pytest.mark.slow),
    {"mode": "forward"},
    GENERATED,
    pytest.param({"batch_size": 2, **GENERATED, "query_len": 3}, marks=pytest.mark.slow),
    pytest.param({"mode": "forward", **PACKED}, marks=pytest.mark.slow),
    pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
    {"dtype": "bfloat16", **PACKED},
]


@pytest.mark.parametrize("fields", FORMS, ids=str)
@pytest.mark.parametrize("name", [slow("sdpa-model"), "dilabench-model"])
def test_attentions_that_are_right_pass(name, fields):
    verification, why = verified(target_of(name), **fields)
    assert verification.passed, why


@pytest.mark.parametrize("fields", [{}, PACKED, {"mode": "forward"}, slow(GENERATED)], ids=str)
def test_values_are_the_attention_of_a_window_of_each_token(fields):
    verification, why = verified(target_of("identity-model"), window=ITSELF, **fields)
    assert verification.passed, why
    assert not verified(target_of("identity-model"), **fields)[0].passed


@pytest.mark.parametrize("fields", [{}, slow(GENERATED)], ids=str)
def test_windows_of_the_models_own_layers_are_right(fields):
    verification, why = verified(target_of("dilabench-model"), WINDOWED, **fields)
    assert verification.passed, why


@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, PACKED, GENERATED], ids=str)
@pytest.mark.parametrize("model", [GPT_OSS, GEMMA2], ids=["sinks", "softcap"])
@pytest.mark.slow
def test_sinks_and_capped_scores_are_right(model, fields):
    verification, why = verified(target_of("dilabench-model"), **model, **fields)
    assert verification.passed, why


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"mode": "forward"}, GENERATED], ids=str)
@pytest.mark.parametrize("model", [GPT_OSS, GEMMA2, {"model": WINDOWED}], ids=["sinks", "softcap", "window"])
def test_eager_attention_by_rows_is_eager_attention(model, fields, monkeypatch):
    monkeypatch.setattr("dilabench.compat.transformers.model.ROWS", 50)
    verification, why = verified(target_of("eager-rows-model"), **model, **fields)
    assert verification.passed, why


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT_OSS, GEMMA2], ids=["sinks", "softcap"])
def test_values_are_the_attention_of_each_token_alone_with_sinks_and_caps(model):
    verification, why = verified(target_of("identity-model"), window=ITSELF, **model)
    assert verification.passed, why


@pytest.mark.parametrize("fields", [slow({}), {"mode": "forward"}, slow(GENERATED)], ids=str)
@pytest.mark.parametrize("name", [slow("sdpa-model"), "dilabench-model"])
def test_padded_sequences_are_as_alone(name, fields):
    verification, why = verified(target_of(name), **PADDED, **fields)
    assert verification.passed, why


@pytest.mark.slow
def test_losses_of_padding_do_not_count(chosen):
    verification, why = verified(f"{__name__}:build_with_losses_of_padding", **PADDED)
    assert verification.passed, f"without a mistake: {why}"
    chosen[0] = True
    assert not verified(f"{__name__}:build_with_losses_of_padding", **PADDED)[0].passed


def build_with_losses_of_padding(workload, context):
    from dilabench.compat.transformers.model import build_sdpa

    step = build_sdpa(workload, context)
    if CHOSEN[0]:
        step.seen = torch.ones_like(step.seen)
    return step


@pytest.mark.parametrize("fields", [slow({}), PACKED], ids=str)
def test_a_pattern_is_compared_with_its_counts(fields):
    dilated = {"pattern": "dilated", "segment_lengths": (32, 128), "dilation_rates": (1, 2)}
    model = {**LLAMA, "layers": 1}
    verification, why = verified(target_of("dilabench-model"), model, **dilated, **fields)
    assert verification.passed, why
    assert not verified(target_of("sdpa-model"), model, **dilated, **fields)[0].passed


# Near misses: an attention for the name 'near_miss', which the builders below take.


def attend(
    module,
    query,
    key,
    value,
    mask,
    scaling=None,
    cu_seq_lens_q=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    miss=None,
    **_,
):
    """Attention by a mask for every pair, with one mistake; `miss` may be one in decoding alone."""
    keys = torch.arange(key.shape[2])
    rows = keys[-query.shape[2] :]
    groups = query.shape[1] // key.shape[1]
    is_last = module.layer_idx == 2
    if miss and miss.startswith("as timed "):
        miss = miss.removeprefix("as timed ") if len(rows) == AS_TIMED else None
    if miss and miss.startswith("decoding: "):
        miss = miss.removeprefix("decoding: ") if len(rows) < len(keys) else None
    seen = rows[:, None] >= keys
    if miss == "sees the next token":
        seen = rows[:, None] + 1 >= keys
    if miss == "does not see itself":
        seen = (rows[:, None] > keys) | (rows[:, None] + keys == 0)
    if miss == "the cache is one token late":
        seen = seen & (rows[:, None] - keys != 1)
    if miss == "the cache lacks its first token":
        seen = seen & (keys > 0)
    if miss == "is not causal in one layer" and is_last:
        seen = torch.ones_like(seen)
    width = None if sliding_window is None else sliding_window + (miss == "window off by one")
    width = width if width is None or miss != "window too short by one" else width - 1
    if width is not None and miss != "window ignored":
        seen = seen & (rows[:, None] - keys < width)
    if cu_seq_lens_q is not None and miss != "documents leak":
        number = torch.searchsorted(cu_seq_lens_q.long(), rows, right=True)
        seen = seen & (number[:, None] == number)
    if miss == "documents leak by one token" and cu_seq_lens_q is not None:
        first = rows == cu_seq_lens_q[-2]
        seen = seen | (first[:, None] & (rows == cu_seq_lens_q[-2] - 1))
    if miss == "one head of keys for all":
        key, value = (x[:, :1].expand_as(x) for x in (key, value))
    if miss == "heads of keys in another order":
        key, value = (x.repeat(1, groups, 1, 1) for x in (key, value))
    else:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if miss == "another scale in one layer" and is_last:
        scaling = 1.05 * scaling
    if miss == "no gradient of keys":
        key = key.detach()
    scores = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(scores) @ key.to(scores).mT * scaling
    if softcap is not None and miss != "softcap dropped":
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and miss != "padding ignored":
        seen = seen & (mask == 0)
    # Padding sees nothing.
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    sinks = torch.full((query.shape[1],), -torch.inf) if s_aux is None or miss == "sinks dropped" else s_aux
    scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    out = scores.softmax(-1)[..., : len(keys)].to(value.dtype) @ value
    return out.transpose(1, 2).contiguous(), None


MISSES = {
    "sees the next token": {},
    "does not see itself": {},
    "window off by one": {"model": WINDOWED},
    "documents leak": PACKED,
    "one head of keys for all": {},
    "no gradient of keys": {},
    "decoding: the cache is one token late": GENERATED,
    "softcap dropped": GEMMA2,
    "padding ignored": {**PADDED, "mode": "forward"},
    "positions off by one": GENERATED,
}
MORE_MISSES = {
    "another scale in one layer": {},
    "heads of keys in another order": {},
    "documents leak by one token": PACKED,
    "window too short by one": {"model": WINDOWED},
    "is not causal in one layer": {},
    "decoding: sinks dropped": {**GPT_OSS, **GENERATED},
    "decoding: window ignored": {"model": WINDOWED, **GENERATED},
    "decoding: does not see itself": GENERATED,
    "decoding: the cache lacks its first token": GENERATED,
    "decoding: window off by one": {"model": WINDOWED, **GENERATED},
    "decoding: window too short by one": {"model": WINDOWED, **GENERATED},
    "decoding: heads of keys in another order": GENERATED,
    "decoding: softcap dropped": {**GEMMA2, **GENERATED},
    "decoding: padding ignored": {**PADDED, **GENERATED},
    "sinks dropped": GPT_OSS,
}


def build_near_miss(workload, context):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from dilabench.compat.transformers.model import _built

    ALL_ATTENTION_FUNCTIONS.register("near_miss", lambda *given, **named: attend(*given, **named, miss=CHOSEN[0]))
    # Only padding is not known from the arguments.
    masks = (lambda *_, **__: None) if workload.model.lengths is None else eager_mask
    ALL_MASK_ATTENTION_FUNCTIONS.register("near_miss", masks)
    step = _built(workload, context, "near_miss")
    step.model.base_model.register_forward_pre_hook(with_whole_cache, with_kwargs=True)
    return step


def with_whole_cache(_model, given, named):
    """A cache that keeps the keys outside of windows, too, so that attention must hide them."""
    from transformers import DynamicCache

    if named.get("cache") is None and named["use_cache"]:
        named["cache"] = DynamicCache()
    elif named["use_cache"] and CHOSEN[0] == "positions off by one":
        named["position_ids"] = torch.full((1, 1), named["cache"].get_seq_length() + 1)
    return given, named


CHOSEN = [None]
AS_TIMED = 300


@pytest.fixture
def chosen():
    yield CHOSEN
    CHOSEN[0] = None


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("miss", [*MISSES, *map(slow, MORE_MISSES)])
def test_near_misses_are_refused(miss, dtype, chosen):
    fields = (MISSES | MORE_MISSES)[miss]
    verification, why = verified(f"{__name__}:build_near_miss", dtype=dtype, **fields)
    assert verification.passed, f"without a mistake: {why}"
    chosen[0] = miss
    assert not verified(f"{__name__}:build_near_miss", dtype=dtype, **fields)[0].passed


def learned_positions():
    """A GPT-2, whose positions are learned: unlike with rotary ones, their beginning counts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 256, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def build_without_restart(workload, context):
    from dilabench.compat.transformers.model import build_sdpa

    step = build_sdpa(workload, context)
    if CHOSEN[0] and workload.layout == "packed":
        step.places = torch.arange(workload.seq_len)[None]
    return step


def test_positions_that_do_not_restart_are_refused(chosen):
    gpt2 = {"source": f"{__name__}:learned_positions", "layers": 2, "width": 64, "vocabulary": 256}
    fields = {"model": gpt2, "num_kv_heads": 4, **PACKED}
    verification, why = verified(f"{__name__}:build_without_restart", **fields)
    assert verification.passed, f"without a mistake: {why}"
    chosen[0] = True
    assert not verified(f"{__name__}:build_without_restart", **fields)[0].passed


@pytest.mark.parametrize("miss", ["sees the next token", "is not causal in one layer"])
def test_what_is_right_in_short_must_be_right_as_timed(miss, chosen):
    chosen[0] = f"as timed {miss}"
    verification, _ = verified(f"{__name__}:build_near_miss", seq_len=AS_TIMED)
    wrong = [check for check in verification.checks if not check.passed]
    assert wrong
    assert all(check.detail.startswith("against sdpa") for check in wrong)


def test_a_model_of_other_heads_is_refused():
    with pytest.raises(ValueError, match="vocabulary 300 where it has 256"):
        verified(
            target_of("sdpa-model"),
            {"source": f"{__name__}:learned_positions", "layers": 2, "width": 64, "vocabulary": 300},
        )
