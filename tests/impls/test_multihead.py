"""The modules around `gather` and `strided`: same parameters everywhere, projections and nothing else."""

import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dilabench.attention import MultiheadDilatedAttention
from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls import gather, multihead, strided
from dilabench.impls.multihead import ProjectedAttention
from dilabench.workload.spec import Workload

CONTEXT = BuildContext(device=torch.device("cpu"), backend=LoadedBackend("math", math.attend, math.attend_backward))
WORKLOAD = Workload.model_validate(
    {
        "pattern": {"kind": "dilated", "segment_lengths": (10, 24), "dilation_rates": (1, 3)},
        "batch_size": 2,
        "seq_len": 37,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 4,
        "dtype": "float64",
    }
)
BOTH = pytest.mark.parametrize(
    ("build", "core"), [(multihead.build_gather, gather), (multihead.build_strided, strided)], ids=["gather", "strided"]
)


@BOTH
def test_projections_around_the_core(build: Any, core: ModuleType) -> None:
    module = build(WORKLOAD, CONTEXT)
    x = torch.randn(2, 37, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = module.state_dict()

    def projected(name: str, heads: int) -> torch.Tensor:
        return (x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]).view(2, 37, heads, 4)

    inner = core.build(WORKLOAD, CONTEXT)(projected("q_proj", 6), projected("k_proj", 2), projected("v_proj", 2))
    expected = inner.reshape(2, 37, 24) @ parameters["out_proj.weight"].T + parameters["out_proj.bias"]
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(module(x, x, x), expected)


@BOTH
def test_parameters_do_not_depend_on_the_global_seed(build: Any, core: ModuleType) -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(build(WORKLOAD, CONTEXT).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["k_proj.weight"].shape == (8, 24)
    assert states[0]["k_proj.weight"].dtype == torch.float64
    assert states[0]["k_proj.weight"].std() > 0


def test_the_core_can_be_replaced() -> None:
    module = multihead.build_strided(WORKLOAD, CONTEXT)
    x = torch.randn(2, 37, 24, dtype=torch.float64)
    module.attention = lambda q, k, v: torch.zeros_like(q)
    assert torch.equal(module(x), module.out_proj.bias.expand(2, 37, 24))


def test_norm_is_applied_before_the_output_projection() -> None:
    module = ProjectedAttention(24, 6, lambda q, k, v: 5 + 3 * q, norm=True)
    seen: list[torch.Tensor] = []
    module.out_proj.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0]))
    module(torch.randn(2, 37, 24))
    torch.testing.assert_close(seen[0].mean(-1), torch.zeros(2, 37), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen[0].var(-1, correction=0), torch.ones(2, 37), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((25, 6, 6), "embed_dim 25 is not a multiple of num_heads 6"),
        ((24, 6, 4), "num_heads 6 is not a multiple"),
        ((24, 0, None), "num_heads 0 must be a whole number of at least 1"),
        ((24, 6, 0), "num_kv_heads 0 must be a whole number of at least 1"),
        ((0, 6, 6), "embed_dim 0 must be"),
        (("24", 6, 6), "embed_dim '24' must be"),
        ((24.0, 6, 6), "embed_dim 24.0 must be"),
        ((24, torch.tensor(6), 6), r"num_heads tensor\(6\) must be"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    embed_dim, num_heads, num_kv_heads = sizes
    with pytest.raises(ValueError, match=message):
        ProjectedAttention(embed_dim, num_heads, lambda q, k, v: q, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize(
    ("embeddings", "bounds", "message"),
    [
        (torch.zeros(2, 37, 23), None, r"query (2, 37, 23) must be [B, N, E] with E = 24, the embed_dim"),
        (torch.zeros(37, 24), None, r"query (37, 24) must be [B, N, E] with E = 24; packed sequences [T, E] take"),
        (torch.zeros(1, 37, 24), (0, 37), r"query (1, 37, 24) must be [T, E] with E = 24; leave out the batch axis"),
        (np.zeros((2, 37, 24)), None, r"query is a numpy.ndarray; give a tensor [B, N, E]"),
    ],
    ids=["width", "no batch", "batch", "numpy"],
)
def test_other_embeddings_are_refused(embeddings: Any, bounds: Any, message: str) -> None:
    module = MultiheadDilatedAttention(24, 6, segment_lengths=(10,), dilation_rates=(1,))
    with pytest.raises(ValueError, match=re.escape(message)):
        module(embeddings, cu_seqlens=bounds)
    name = "key" if bounds is None else "value"
    good = torch.zeros((37, 24) if bounds else (2, 37, 24))
    with pytest.raises(ValueError, match=re.escape(message.replace("query", name))):
        module(good, **{"key": good, name: embeddings}, cu_seqlens=bounds)


def test_packed_embeddings_come_out_as_each_sequence_does_alone() -> None:
    options: dict[str, Any] = {"segment_lengths": (10, 24), "dilation_rates": (1, 3), "norm": True}
    module = MultiheadDilatedAttention(24, 6, **options).double()
    x = torch.randn(37, 24, dtype=torch.float64)
    alone = [module(part[None])[0] for part in x.split((11, 1, 25))]
    torch.testing.assert_close(module(x, cu_seqlens=(0, 11, 12, 37)), torch.cat(alone), rtol=0, atol=1e-12)
