"""How the package is imported: without its own import, over flash-attn or a stand-in, and without a trace."""

import inspect
import sys
from types import ModuleType

import pytest
import torch

from dilabench.backends import math
from dilabench.contracts import BuildContext, LoadedBackend
from dilabench.impls.peers import flash_attn_stand_in, ring_flash_attn
from dilabench.workload.spec import Workload

MATH = LoadedBackend("math", math.attend, math.attend_backward)
WORKLOAD = Workload(pattern={"kind": "dense"}, batch_size=1, seq_len=64, num_heads=2, num_kv_heads=2, head_dim=8)


def test_nothing_of_the_stand_in_is_left_behind(recorded, monkeypatch):
    theirs = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", theirs)
    module = ring_flash_attn._imported("zigzag_ring_flash_attn", MATH)
    assert callable(module.zigzag_ring_flash_attn_func)
    assert sys.modules["flash_attn"] is theirs
    assert not [name for name in sys.modules if name.startswith(("ring_flash_attn", "flash_attn."))]


def test_flash_attn_itself_is_called_where_it_is_the_backend(recorded, monkeypatch):
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = object(), object()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    module = ring_flash_attn._imported("ring_flash_attn", LoadedBackend("flash2", math.attend, math.attend_backward))
    assert module._flash_attn_forward is interface._flash_attn_forward


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(ring_flash_attn, "PACKAGE", "ring_flash_attn_that_nobody_has")
    with pytest.raises(ModuleNotFoundError, match=r"ring_flash_attn_that_nobody_has is not installed; pip install"):
        ring_flash_attn._imported("ring_flash_attn", MATH)


def test_one_process_is_refused():
    with pytest.raises(ValueError, match="needs the other ranks"):
        ring_flash_attn.build_zigzag(WORKLOAD, BuildContext(device=torch.device("cpu"), backend=MATH))


# flash-attn 2.7.0 to 2.8.3, flash_attn/flash_attn_interface.py
OPTIONS = ["dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"]
FORWARD = ["q", "k", "v", *OPTIONS, "return_softmax"]
BACKWARD = ["dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", *OPTIONS, "deterministic", "rng_state"]


def test_the_stand_in_has_the_recorded_signatures():
    module = flash_attn_stand_in.stand_in(MATH)
    assert list(inspect.signature(module._flash_attn_forward).parameters) == FORWARD
    assert list(inspect.signature(module._flash_attn_backward).parameters) == BACKWARD


def test_the_stand_in_writes_into_what_it_is_given():
    module = flash_attn_stand_in.stand_in(MATH)
    q, k, v, dout = (torch.randn(1, 9, 2, 8, dtype=torch.float64) for _ in range(4))
    shared = (0.0, 0.3, True, -1, -1, 0.0, None)
    out, lse, _, _ = module._flash_attn_forward(q, k, v, *shared, False)
    torch.testing.assert_close((out, lse), math.attend(q, k, v, causal=True, scale=0.3))
    given = [torch.empty(1, 18, 2, 8, dtype=torch.float64)[:, ::2] for _ in range(3)]
    module._flash_attn_backward(dout, q, k, v, out, lse, *given, *shared, False)
    torch.testing.assert_close(tuple(given), math.attend_backward(dout, q, k, v, out, lse, causal=True, scale=0.3))


def test_the_stand_in_refuses_what_it_would_not_compute():
    module = flash_attn_stand_in.stand_in(MATH)
    q = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"dropout 0\.1, softcap 0\.0 and ALiBi slopes"):
        module._flash_attn_forward(q, q, q, 0.1, 1.0, True, -1, -1, 0.0, None, False)


def test_what_projects_import_besides_is_there_and_refuses_to_be_called():
    package, module = flash_attn_stand_in.stand_ins(MATH)
    assert package.__version__ > "2.6.3"
    assert not hasattr(module, "__path__")
    with pytest.raises(NotImplementedError, match="_flash_attn_varlen_forward is not computed by the stand-in"):
        module._flash_attn_varlen_forward(torch.zeros(1))
    assert flash_attn_stand_in.stand_ins(LoadedBackend("flash2", math.attend)) == ()


def test_the_stand_in_over_a_backend_without_a_backward_pass_says_so():
    module = flash_attn_stand_in.stand_in(LoadedBackend("one-way", math.attend))
    q = torch.randn(1, 4, 1, 8)
    lse = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="backend one-way has no backward pass"):
        module._flash_attn_backward(q, q, q, q, q, lse, q, q, q, 0.0, 1.0, True, -1, -1, 0.0, None, False)
