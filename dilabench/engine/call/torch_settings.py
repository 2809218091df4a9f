"""torch's process-wide settings: what one implementation changes must not reach the others of its worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Setting:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _attribute(owner: Any, owner_name: str, name: str) -> _Setting:
    return _Setting(f"{owner_name}.{name}", lambda: getattr(owner, name), lambda was: setattr(owner, name, was))


def _kernel(name: str) -> _Setting:
    backends = torch.backends.cuda
    return _Setting(f"{name}_sdp", getattr(backends, f"{name}_sdp_enabled"), getattr(backends, f"enable_{name}_sdp"))


_MATMUL = ("fp32_precision", "allow_tf32", "allow_fp16_reduced_precision_reduction")
# fp32_precision before allow_tf32: torch refuses to read the older one while the newer one says something else.
_SETTINGS = (
    _Setting("grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("threads", torch.get_num_threads, torch.set_num_threads),
    _Setting("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(_attribute(torch.backends.cuda.matmul, "cuda.matmul", name) for name in _MATMUL),
    *(_attribute(torch.backends.cudnn, "cudnn", name) for name in ("allow_tf32", "benchmark", "deterministic")),
    *(_kernel(name) for name in ("flash", "mem_efficient", "math", "cudnn")),
)


def read_settings() -> dict[str, Any]:
    """Every setting by name; None if this torch has it not, or does not say."""
    return {setting.name: _read(setting) for setting in _SETTINGS}


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except (RuntimeError, AttributeError):
        return None


@contextmanager
def settings_kept(changed: dict[str, str]) -> Iterator[None]:
    """Put every setting back as it was before the block; `changed` gets those that were not, as 'True, was False'."""
    before = read_settings()
    try:
        yield
    finally:
        after = read_settings()
        for setting in _SETTINGS:
            was, now = before[setting.name], after[setting.name]
            if now != was and was is not None:
                changed[setting.name] = f"{now}, was {was}"
                setting.write(was)


def as_text(changed: Mapping[str, str]) -> str:
    """'default dtype (torch.float64, was torch.float32) and threads (1, was 2)'."""
    return " and ".join(f"{name} ({change})" for name, change in changed.items())
