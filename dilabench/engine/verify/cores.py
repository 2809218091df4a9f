"""A module's attention core: its replacement in verification, and the shell around it.

The oracle's results for a module hold for every module that differs in its attention only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.engine.verify.call import digest
from dilabench.engine.verify.oracle.reference import differentiable_rows
from dilabench.workload.spec import Workload

CORE = "attention"
PLAIN = (bool, int, float, str, tuple, type(None))
_CHILDREN = {"_parameters", "_buffers", "_modules"}
_USUAL: dict[str, Any] = vars(nn.Module())


class ReplacedCore(nn.Module):
    """The replacement of a module's attention core in verification: always of this class, whatever it `answers`.

    A forward that could distinguish the cores could be projections around only one of them.
    """

    def __init__(self, answers: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._answers = answers

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, H, D] or packed [T, H, D] -> out of the same shape."""
        return self._answers(q, k, v)


class SampledRows:
    """The formula on some rows, zeros elsewhere. Keeps q, k, v, out and lse of its calls in `seen`, the latest last.

    If `instead` is set, it is returned.
    """

    def __init__(self, workload: Workload, rows: Tensor, dtype: torch.dtype) -> None:
        self.workload, self.rows, self.compute_dtype = workload, rows, dtype
        self.seen: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self.instead: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, N, H, D] or packed [T, H, D] -> out of the same shape."""
        if self.instead is not None:
            return self.instead
        q_heads, k_heads, v_heads = (self.batched(x) for x in (q, k, v))
        out, lse = differentiable_rows(q_heads, k_heads, v_heads, self.workload, self.rows, self.compute_dtype)
        out = out[0] if q.ndim == 3 else out
        self.seen.append((q, k, v, out, lse.detach()))
        return out

    @staticmethod
    def batched(x: Tensor) -> Tensor:
        """With the batch axis that packed heads lack."""
        return x[None] if x.ndim == 3 else x


class CoreCallsError(Exception):
    """A copy of the module did not call its core once."""


class Constant:
    """A constant for any inputs; `calls` holds the inputs."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def __call__(self, *heads: Tensor) -> Tensor:
        """Random numbers of q's shape, the same in every call."""
        self.calls.append(tuple(x.detach() for x in heads))
        query = heads[0]
        generator = torch.Generator(query.device).manual_seed(0)
        return torch.randn(query.shape, generator=generator, device=query.device, dtype=query.dtype)


@dataclass(frozen=True, slots=True)
class Shell:
    """All of a module but its attribute `attention`: classes and plain values by name, digests of its tensors."""

    facts: tuple[tuple[str, object], ...]
    digests: dict[str, Tensor]

    def computes_as(self, other: Shell) -> bool:
        """Whether both give the same around the same attention, bit for bit."""
        alike = self.facts == other.facts and self.digests.keys() == other.digests.keys()
        return alike and all(torch.equal(own_digest, other.digests[name]) for name, own_digest in self.digests.items())


def shell_of(module: nn.Module) -> Shell | None:
    """None for a module with parts that cannot be compared: hooks, functions, unknown objects."""
    facts: list[tuple[str, object]] = []
    for name, part in module.named_modules():
        if name.split(".")[0] == CORE:
            continue
        facts.append((name, type(part)))
        for key, value in vars(part).items():
            # Other values are among its plain attributes.
            if key in _CHILDREN or (not name and key == CORE):
                continue
            if key in _USUAL and key != "training":
                if value != _USUAL[key]:
                    return None
            elif not isinstance(value, PLAIN):
                return None
            facts.append((f"{name}.{key}", value))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {name: tensor for name, tensor in tensors.items() if name.split(".")[0] != CORE}
    facts += [(name, (tensor.shape, tensor.dtype, tensor.requires_grad)) for name, tensor in own.items()]
    return Shell(
        tuple(facts), {name: digest(tensor if tensor.ndim else tensor.reshape(1)) for name, tensor in own.items()}
    )
