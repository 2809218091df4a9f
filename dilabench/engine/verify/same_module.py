"""Do two modules compute the same but for their attention? Then what the oracle expects of one holds for the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilabench.engine.verify.call import digest

CORE = "attention"
PLAIN = (bool, int, float, str, tuple, type(None))
_CHILDREN = {"_parameters", "_buffers", "_modules"}
_USUAL: dict[str, Any] = vars(nn.Module())


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
