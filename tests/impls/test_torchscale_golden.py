"""With zero keys, blocked offsets and a detached merge, ours is torchscale's function: its own outputs and gradients.

So is the adapter of torchscale itself, over a package with its recorded signatures.

The files hold what torchscale's module computed in float64 (a reference attention in place of flash-attn): weights,
input x, the attention's out before the norm, the result y, and the gradients of all under dy.
"""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm, linear

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.engine.verify.oracle import reference
from dilabench.impls import gather, strided
from dilabench.impls.peers import torchscale
from dilabench.workload.spec import Workload
from tests.conftest import half_are_slow

GOLDEN = Path(__file__).parents[1] / "golden" / "torchscale"
CONTEXT = BuildContext(device=torch.device("cpu"), backend=LoadedBackend("math", math.attend, math.attend_backward))


@pytest.fixture(autouse=True)
def torchscale_as_recorded(monkeypatch):
    monkeypatch.setenv("DILABENCH_PEERS", str(Path(__file__).parent / "peers" / "recorded"))


@pytest.mark.parametrize(
    ("module", "name"),
    half_are_slow(
        [reference, gather, strided, torchscale],
        ["gigapath_scaled", "heads_no_multiple_of_rate", "short_last_segment", "whole_causal"],
    ),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_outputs_and_gradients_are_torchscales(module: ModuleType, name: str) -> None:
    with np.load(GOLDEN / f"{name}.npz") as file:
        saved = {key: torch.from_numpy(file[key]) for key in file.files if key != "config"}
        config = json.loads(str(file["config"]))
    shape = {field: config[field] for field in ("batch_size", "seq_len", "num_heads", "head_dim", "causal")}
    branches = {field: config[field] for field in ("segment_lengths", "dilation_rates")}
    options = {"offset": "blocked", "padding": "zero_key", "merge_grad": "detached"}
    workload = Workload.model_validate(
        {
            "pattern": {"kind": "dilated", **branches, **options},
            **shape,
            "num_kv_heads": config["num_heads"],
            "dtype": "float64",
            "mode": "both",
        }
    )
    leaves = {key.removeprefix("weight."): saved[key] for key in saved if key.startswith("weight.")} | {"x": saved["x"]}
    for leaf in leaves.values():
        leaf.requires_grad_()
    q, k, v = (
        linear(leaves["x"], leaves[f"{one}_proj.weight"], leaves[f"{one}_proj.bias"]).unflatten(
            -1, (config["num_heads"], -1)
        )
        for one in "qkv"
    )
    out = module.build(workload, CONTEXT)(q, k, v)
    y = out.flatten(2)
    if config["subln"]:
        norm = leaves["inner_attn_ln.weight"], leaves["inner_attn_ln.bias"]
        y = layer_norm(y, y.shape[-1:], *norm, config["layernorm_eps"])
    y = linear(y, leaves["out_proj.weight"], leaves["out_proj.bias"])
    torch.testing.assert_close(out, saved["out"], rtol=0, atol=1e-12)
    torch.testing.assert_close(y, saved["y"], rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(y, list(leaves.values()), saved["dy"])
    for key, gradient in zip(leaves, gradients, strict=True):
        if f"grad.{key}" in saved:
            torch.testing.assert_close(gradient, saved[f"grad.{key}"], rtol=0, atol=1e-12, msg=f"gradient of {key}")
