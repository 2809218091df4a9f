"""The drop-in for torchscale's module: golden outputs of its own, state dicts, what `patch` swaps, refusals."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilabench.compat.torchscale import DilatedAttention, Multiway, XPos, packed, patch
from tests.attention.compared import BOUNDS
from tests.conftest import half_are_slow

# What torchscale's own module gave in float64, as tests/impls/test_torchscale_golden.py says.
GOLDEN = Path(__file__).parents[1] / "golden" / "torchscale"
MODULES = ["gigapath_scaled", "heads_no_multiple_of_rate", "multiway_xpos", "short_last_segment", "whole_causal"]


def arguments(**changes: Any) -> SimpleNamespace:
    fields = {"segment_length": [8, 12, 64], "dilated_ratio": [1, 2, 4], "multiway": False, "layernorm_eps": 1e-5}
    return SimpleNamespace(**{**fields, "xpos_rel_pos": False, "xpos_scale_base": 512, **changes})


def golden(name: str) -> tuple[DilatedAttention, dict[str, Any], dict[str, Tensor]]:
    """The module with torchscale's state dict, its configuration, and x, y, dy and gradients."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        saved = {key: torch.from_numpy(file[key]) for key in file.files if key != "config"}
        config = json.loads(str(file["config"]))
    shared = {key: config[key] for key in ("layernorm_eps", "multiway", "xpos_rel_pos") if key in config}
    args = arguments(segment_length=config["segment_lengths"], dilated_ratio=config["dilation_rates"], **shared)
    embed_dim = config["num_heads"] * config["head_dim"]
    module = DilatedAttention(args, embed_dim, config["num_heads"], self_attention=True, subln=config["subln"]).double()
    module.load_state_dict({key.removeprefix("weight."): saved[key] for key in saved if key.startswith("weight.")})
    for part in module.modules():
        if isinstance(part, Multiway):
            part.split_position = config["split_position"]
    return module, config, saved


@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients_are_torchscales(name: str) -> None:
    module, config, saved = golden(name)
    x = saved["x"].requires_grad_()
    y, weights = module(x, x, x, key_padding_mask=torch.zeros(x.shape[:2]), is_causal=config["causal"])
    assert weights is None
    torch.testing.assert_close(y, saved["y"], rtol=0, atol=1e-12)
    leaves = {"x": x, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(y, list(leaves.values()), saved["dy"])
    for key, gradient in zip(leaves, gradients, strict=True):
        if f"grad.{key}" in saved:
            torch.testing.assert_close(gradient, saved[f"grad.{key}"], rtol=0, atol=1e-12, msg=f"gradient of {key}")


def test_the_exact_gradient_is_another_one() -> None:
    module, _, saved = golden("short_last_segment")
    module.merge_grad = "exact"
    x = saved["x"].requires_grad_()
    (dx,) = torch.autograd.grad(module(x, x, x)[0], x, saved["dy"])
    assert 0.01 < float((dx - saved["grad.x"]).norm() / saved["grad.x"].norm()) < 0.5


@pytest.mark.parametrize("subln", [True, False])
@pytest.mark.parametrize("multiway", [True, False])
@pytest.mark.parametrize("xpos_rel_pos", [True, False])
def test_state_dicts_have_torchscales_keys(subln: bool, multiway: bool, xpos_rel_pos: bool) -> None:
    args = arguments(multiway=multiway, xpos_rel_pos=xpos_rel_pos)
    module = DilatedAttention(args, 16, 4, self_attention=True, subln=subln)
    parts = ["k_proj", "v_proj", "q_proj", "out_proj", *(["inner_attn_ln"] if subln else [])]
    copies = [".A.", ".B."] if multiway else ["."]
    expected = [f"{part}{copied}{one}" for part in parts for copied in copies for one in ("weight", "bias")]
    assert list(module.state_dict()) == expected + (["xpos.scale"] if xpos_rel_pos else [])
    module.reset_parameters()
    assert not any(value.any() for key, value in module.state_dict().items() if key.endswith("out_proj.bias"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_floating_type(dtype: torch.dtype) -> None:
    module, _, saved = golden("short_last_segment")
    x = saved["x"].to(dtype)
    y, _ = module.to(dtype)(x, x, x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), saved["y"], rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_autocast_and_checkpointing() -> None:
    module, _, saved = golden("short_last_segment")
    module.float()
    x = saved["x"].float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, x, x)[0]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), saved["y"], rtol=0, atol=0.1)
    results = []
    for call in (lambda: module(x, x, x)[0], lambda: checkpoint(lambda: module(x, x, x)[0], use_reentrant=False)):
        y = call()
        results.append((y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], saved["dy"].float())))
    for actual, value in zip(*results, strict=True):
        assert torch.equal(actual, value)


@pytest.mark.slow
def test_compiles_without_a_graph_break() -> None:
    module, _, saved = golden("short_last_segment")
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    x = saved["x"].requires_grad_()
    y = compiled(x, x, x)[0]
    torch.testing.assert_close(y, saved["y"], rtol=0, atol=1e-12)
    (dx,) = torch.autograd.grad(y, x, saved["dy"])
    torch.testing.assert_close(dx, saved["grad.x"], rtol=0, atol=1e-12)


class TheirAttention(nn.Module):
    """Stands for torchscale's plain attention, which must be left alone: it has no dilated branches."""

    def __init__(self, args: SimpleNamespace, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        ours = DilatedAttention(args, embed_dim, num_heads, self_attention=True, subln=True)
        self.__dict__ |= ours.__dict__


class TheirDilatedAttention(TheirAttention):
    """Stands for torchscale's module: its attributes, and the methods that tell it from the plain one."""

    def dense_to_sparse(self) -> None: ...
    def sparse_to_dense(self) -> None: ...


def test_patch_swaps_what_is_dilated_and_nothing_else() -> None:
    layers = nn.ModuleList(TheirDilatedAttention(arguments(), 16, 4) for _ in range(2))
    model = nn.Sequential(nn.ModuleDict({"self_attn": layers[0], "cross_attn": TheirAttention(arguments(), 16, 4)}))
    model.append(nn.ModuleDict({"wrapped": torch.compile(layers[1])}))
    parameters, keys = [id(one) for one in model.parameters()], list(model.state_dict())
    called: list[str] = []
    layers[0].register_forward_hook(lambda *_: called.append("hook"))
    assert patch(model, merge_grad="exact") == ["0.self_attn", "1.wrapped._orig_mod"]
    assert [id(one) for one in model.parameters()] == parameters
    assert list(model.state_dict()) == keys
    assert [type(one).__name__ for one in model[0].values()] == ["DilatedAttention", "TheirAttention"]
    x = torch.randn(1, 13, 16)
    fresh = DilatedAttention(arguments(), 16, 4, self_attention=True, subln=True)
    fresh.load_state_dict(layers[0].state_dict())
    with torch.no_grad():
        assert torch.equal(layers[0](x, x, x)[0], fresh(x, x, x)[0])
    assert called == ["hook"]
    assert (layers[0].merge_grad, fresh.merge_grad) == ("exact", "detached")
    assert patch(model) == [], "all have been swapped"
    assert patch(layers) == []
    with pytest.raises(ValueError, match="merge_grad 'both' is not one of exact, detached"):
        patch(model, merge_grad="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.zeros(13, 13)}, "attn_mask and rel_pos are not supported.*is_causal"),
        ({"rel_pos": torch.zeros(1)}, "attn_mask and rel_pos are not supported"),
        ({"key_padding_mask": torch.zeros(1, 12)}, r"key_padding_mask \(1, 12\) must be \[B, N\], here \(1, 13\)"),
        ({"key": torch.zeros(1, 12, 16)}, r"key \(1, 12, 16\).*must all be \[B, N, 16\].*dense attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refuses_calls_that_torchscale_computes_otherwise(options: dict[str, Any], message: str) -> None:
    module = DilatedAttention(arguments(), 16, 4, self_attention=True)
    x = torch.randn(1, 13, 16)
    with pytest.raises(ValueError, match=message):
        module(**{"query": x, "key": x, "value": x, **options})


def test_refuses_what_it_is_configured_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 30, 16)
    dropping = DilatedAttention(arguments(), 16, 4, dropout=0.1, self_attention=True)
    with pytest.raises(ValueError, match=r"dropout 0\.1 of attention weights in training.*set attention_dropout to 0"):
        dropping(x, x, x)
    dropping.eval()(x, x, x)
    with pytest.raises(ValueError, match=r"in segments of 10 at rate 4: 4 does not divide 10.*use"):
        DilatedAttention(arguments(segment_length=[8, 12, 10]), 16, 4, self_attention=True)(x, x, x)
    over_ranks = DilatedAttention(arguments(seq_parallel=True), 16, 4, self_attention=True)
    over_ranks(x, x, x)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"seq_parallel over 2 ranks.*reach beyond the 30 positions.*set seq_parallel"):
        over_ranks(x, x, x)
    over_ranks(*[torch.randn(1, 64, 16)] * 3)


def test_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="embed_dim 15 is not a multiple of num_heads 4"):
        DilatedAttention(arguments(), 15, 4, self_attention=True)
    with pytest.raises(ValueError, match="embed_dim 16 is not a multiple of num_heads 0"):
        DilatedAttention(arguments(), 16, 0, self_attention=True)
    with pytest.raises(ValueError, match="are both False; set one of them"):
        DilatedAttention(arguments(), 16, 4)
    with pytest.raises(ValueError, match="head_dim 5 is odd; use an even one"):
        XPos(5)


@pytest.mark.parametrize("xpos", [False, True])
def test_packed_sequences_come_out_as_each_does_alone(xpos: bool) -> None:
    module = DilatedAttention(arguments(xpos_rel_pos=xpos), 32, 4, self_attention=True, subln=True).double()
    x = torch.randn(1, 60, 32, dtype=torch.float64)
    bounds = (0, 20, 20, 21, 60)
    with packed(nn.Sequential(module), torch.tensor(bounds, dtype=torch.int32) if xpos else bounds):
        together = module(x, x, x)[0]
    alone = [module(part, part, part)[0] for part in x.split((20, 1, 39), 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=0, atol=1e-12)
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    assert module.cu_seqlens is None


def test_refuses_bounds_that_do_not_fit() -> None:
    module = DilatedAttention(arguments(), 32, 4, self_attention=True)
    x = torch.randn(1, 60, 32)
    with packed(module, (0, 20, 50)), pytest.raises(ValueError, match=r"query \(1, 60, 32\) must be \[1, 50, E\]"):
        module(x, x, x)
    with pytest.raises(ValueError, match="must rise from 0"), packed(module, (0, 20, 10)):
        pass
    with pytest.raises(ValueError, match=r"call patch\(model\) first"), packed(nn.Linear(2, 2), (0, 2)):
        pass


class Decoder(nn.Module):
    """A LongNet decoder as torchscale builds it: token by token its layers get their states from one dict by number."""

    def __init__(self, args: SimpleNamespace, width: int = 32, layers: int = 2, tokens: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(
            DilatedAttention(args, width, 4, self_attention=True, subln=True) for _ in range(layers)
        )
        self.feed = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, tokens: Tensor, states: dict[Any, Any] | None = None) -> Tensor:
        is_first = states is not None and states.get("is_first_step", False)
        x = self.embed(tokens if states is None or is_first else tokens[:, -1:])
        for number, (layer, feed) in enumerate(zip(self.layers, self.feed, strict=True)):
            state = None if states is None else states.setdefault(number, {})
            x = x + layer(x, x, x, incremental_state=state, is_first_step=is_first, is_causal=True)[0]
            x = x + feed(x)
        return x @ self.embed.weight.T


@pytest.mark.parametrize(
    ("changes", "prompt"), half_are_slow([{}, {"xpos_rel_pos": True}, {"multiway": True}], [1, 13]), ids=str
)
def test_a_decoder_generates_the_logits_of_the_whole_pass(changes: dict[str, Any], prompt: int) -> None:
    """Over several segments of each length; multiway modules apply their first copy to all."""
    torch.manual_seed(0)
    model = Decoder(arguments(segment_length=[8, 16, 64], **changes)).double()
    tokens = torch.randint(50, (2, prompt))
    states: dict[Any, Any] = {"is_first_step": True}
    logits = [model(tokens, states)]
    states["is_first_step"] = False
    for _ in range(64):
        tokens = torch.cat([tokens, logits[-1][:, -1:].argmax(-1)], 1)
        logits.append(model(tokens, states))
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens), rtol=0, atol=1e-12)
    assert states[0]["prev_key"].shape == (2, 4, prompt + 64, 8)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, id="cpu"),
        *(
            pytest.param("cuda", dtype, id=f"cuda-{dtype}", marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
def test_a_decoder_of_another_dtype_generates_the_logits_of_the_whole_pass(device: str, dtype: torch.dtype) -> None:
    """For given tokens: the choice of a token would hang on rounding."""
    torch.manual_seed(0)
    exact = Decoder(arguments(segment_length=[8, 16, 64], xpos_rel_pos=True)).double()
    model, tokens = copy.deepcopy(exact).to(device, dtype), torch.randint(50, (2, 40))
    states: dict[Any, Any] = {"is_first_step": True}
    with torch.no_grad():
        logits = [model(tokens[:, :7].to(device), states)]
        states["is_first_step"] = False
        logits += [model(tokens[:, : stop + 1].to(device), states) for stop in range(7, 40)]
        found, right = torch.cat(logits, 1).cpu().double(), exact(tokens)
    assert (found - right).norm() <= BOUNDS[dtype] * right.norm()


def test_a_state_takes_chunks_and_beams() -> None:
    module = DilatedAttention(arguments(xpos_rel_pos=True), 32, 4, self_attention=True).double()
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    whole = module(x, x, x, is_causal=True)[0]
    state: dict[str, Tensor] = {}
    parts = [module(part, part, part, incremental_state=state, is_causal=True)[0] for part in x.split((7, 20, 13), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    beams = {name: kept[torch.tensor([1, 1, 0])][:, :, :39] for name, kept in state.items()}
    last = x[torch.tensor([1, 1, 0]), -1:]
    after = module(last, last, last, incremental_state=beams, is_causal=True)[0]
    torch.testing.assert_close(after, whole[torch.tensor([1, 1, 0]), -1:], rtol=0, atol=1e-12)


def test_a_state_holds_no_packed_sequences() -> None:
    module = DilatedAttention(arguments(), 32, 4, self_attention=True)
    x = torch.randn(1, 20, 32)
    with packed(module, (0, 20)), pytest.raises(ValueError, match="incremental_state within `packed`"):
        module(x, x, x, incremental_state={})
