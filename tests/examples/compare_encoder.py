"""A model of torchscale's dilated attention beside its copy after `patch`: embeddings, time and peak memory."""

import time
from copy import deepcopy
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.compat.torchscale import patch


def compare(model: nn.Module, *inputs: Tensor, rounds: int = 7) -> dict[str, float]:
    """The copy against the model under `no_grad`, interleaved so that both meet the same state of the machine."""
    model.eval()
    patched = deepcopy(model)
    if not patch(patched):
        raise ValueError("the model has no dilated attention of torchscale's")
    with torch.no_grad():
        theirs, ours = first(model(*inputs)).double(), first(patched(*inputs)).double()
        found = {"difference": float((ours - theirs).norm() / theirs.norm())}
        times: dict[str, list[float]] = {"theirs": [], "ours": []}
        for _ in range(rounds):
            times["theirs"].append(seconds(model, *inputs))
            times["ours"].append(seconds(patched, *inputs))
        found |= {f"{side}_s": median(taken) for side, taken in times.items()}
        if inputs[0].is_cuda:
            found |= {"theirs_bytes": peak(model, *inputs), "ours_bytes": peak(patched, *inputs)}
    return found


def first(found: Any) -> Tensor:
    """The first tensor of what a model returns: GigaPath's returns a list of embeddings."""
    while not isinstance(found, Tensor):
        found = found[0]
    return found


def seconds(model: nn.Module, *inputs: Tensor) -> float:
    """Of one call, to the end of its last kernel."""
    wait(inputs[0])
    start = time.perf_counter()
    model(*inputs)
    wait(inputs[0])
    return time.perf_counter() - start


def peak(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes that a call takes above what lay on the GPU before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(*inputs)
    return torch.cuda.max_memory_allocated() - before


def wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()
