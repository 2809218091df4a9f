"""Tensors that are kept from call to call, and calls on any stream.

Kept tensors are made on the host and copied by a call that waits, or are waited for (`wait_for`), so that they are
complete for every stream. Their memory belongs to the stream that was current then: a reader on another stream records
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


def record(values: Iterable[Any]) -> None:
    """The memory of the CUDA tensors among these is not reused before the current stream's work is done."""
    for value in values:
        # One that is only traced may say that it is on a GPU.
        if type(value) is Tensor and value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))


def wait_for(x: Tensor) -> None:
    """Return when the current stream has made x."""
    if type(x) is Tensor and x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a CUDA device: found by its number, in a tenth of the time that torch takes for another
    object of the same stream.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    number = torch._C._cuda_getCurrentRawStream(index)
    stream = _streams.get((index, number))
    if stream is None:
        stream = _streams[index, number] = torch.cuda.current_stream(device)
    return stream


def stream_number(x: Tensor) -> int:
    """The number of the current stream of x's device; 0 on a CPU, and where memory is only traced."""
    if type(x) is not Tensor or not x.is_cuda:
        return 0
    number: int = torch._C._cuda_getCurrentRawStream(x.get_device())
    return number


def is_captured(x: Tensor) -> bool:
    """Return True if a CUDA graph is being captured from what is launched on the device of x."""
    return type(x) is Tensor and x.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def on_a_stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Tensors made inside wait for no other kernel, and are complete for all streams at the end."""
    if device.type != "cuda":
        yield
        return
    stream = _stream_of(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
