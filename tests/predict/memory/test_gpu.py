"""Traces against what torch's CUDA allocator saw; `dilabench plan --check` measures many more."""

import gc

import pytest
import torch

from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.case_spec import case_spec
from dilabench.machine import detect

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WITHIN = 0.1
CASES = {
    "math": ("dense", "math", "DENSE", {}),
    "math over branches": ("strided", "math", "LONG_BRANCHES", {}),
    "block lists": ("block-sparse", None, "SPARSE", {}),
    "block lists, padded heads": ("block-sparse", None, "SPARSE", {"head_dim": 80}),
    "flex": ("flex", None, "LONG_BRANCHES", {}),
    "flex over blocks": ("flex", None, "SPARSE", {}),
    "the formula": ("reference", None, "LONG_BRANCHES", {"seq_len": 4096}),
}


@pytest.mark.parametrize("mode", ["forward", "both"])
@pytest.mark.parametrize("name", CASES)
def test_traces_hold_against_measured_peaks(name, mode, peaks):
    implementation, backend, pattern, fields = CASES[name]
    chosen = peaks.sparse(block_size=128) if pattern == "SPARSE" else getattr(peaks, pattern)
    shape = {"seq_len": 16384, "num_heads": 8, "dtype": "bfloat16", **fields}
    case = peaks.case_of(implementation, backend, chosen, mode=mode, **shape)
    machine, device = detect("cuda"), torch.device("cuda", 0)
    reasons = peaks.catalogue().reasons_against(case, machine)
    if reasons:
        pytest.skip(f"needs the backend of {implementation}: {'; '.join(reasons)}")
    # cuBLAS keeps 32 MiB for each thread that multiplies, from its first product on.
    x = torch.ones(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()
    del x
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    call = PreparedCall(case_spec(case, peaks.catalogue(), 0), device, InputStore(device))
    torch.cuda.reset_peak_memory_stats(device)
    call.fresh()()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    assert peaks.plan(case, "cuda").peak_bytes == pytest.approx(peak, rel=WITHIN)
