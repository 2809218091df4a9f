"""torchscale's adapter over a package with its recorded signatures: what verification says, what it leaves alone."""

import sys

import pytest
import torch

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.engine.verify import summary, verify
from dilabench.impls.peers import torchscale
from dilabench.workload.spec import Workload

CONTEXT = BuildContext(device=torch.device("cpu"), backend=LoadedBackend("math", math.attend, math.attend_backward))
THEIRS = {"offset": "blocked", "padding": "zero_key", "merge_grad": "detached"}


def told(packed=None, **options):
    """What the oracle says of the adapter for a workload with these options of the pattern, perhaps of documents."""
    pattern = {"kind": "dilated", "segment_lengths": (24, 48), "dilation_rates": (1, 3), **THEIRS, **options}
    shape = {"batch_size": 2, "seq_len": 60, "num_heads": 5, "num_kv_heads": 5, "head_dim": 8, "causal": False}
    shape |= {"batch_size": 1, "layout": "packed", "cu_seqlens": packed} if packed else {}
    one = Workload.model_validate({"pattern": pattern, **shape, "dtype": "float64", "mode": "both"})
    return summary(verify(torchscale.build(one, CONTEXT), one))


def test_it_is_right_on_its_own_function_and_named_on_others(recorded):
    kept = set(sys.modules)
    assert told().endswith("checks passed")
    assert told(offset="modulo").startswith("out is that of offset=blocked; ")
    assert told(padding="masked").startswith("out is that of padding=zero_key; ")
    assert told(merge_grad="exact").startswith("dq is that of merge_grad=detached; ")
    assert told(packed=(0, 1, 25, 60)).endswith("checks passed")
    assert not [name for name in sys.modules.keys() - kept if name.startswith("torchscale")]


def test_without_torchscale_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(torchscale, "COMPONENT", "torchscale_that_nobody_has.component")
    with pytest.raises(ModuleNotFoundError, match=r"torchscale_that_nobody_has is not installed; clone it, and name"):
        told()
