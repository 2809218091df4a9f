"""A CUDA graph's capture that may fail without harm to what comes after it, and what must not come between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of samples, and out of a capture: freeing an older graph would end it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def harmless_if_it_fails(device: torch.device) -> Iterator[None]:
    """Around a capture: gives the current stream back, and the device's random numbers if the capture fails.

    A failed capture leaves its own stream as the current one. torch's generator of the device then refuses to draw,
    because it still counts as captured (torch 2.11).
    """
    stream = torch.cuda.current_stream(device)
    generator = torch.cuda.default_generators[stream.device.index]
    before = generator.clone_state()
    try:
        with no_collection():
            yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise
    finally:
        torch.cuda.set_stream(stream)
