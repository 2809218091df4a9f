"""Keys and values of the tokens so far, for models that generate."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values [B, N, K, D] of the N tokens so far, which `append` adds to.

    capacity: tokens for which memory is allocated at first. It doubles when they are more, so that a token costs no
    copy of all tokens. If gradients are wanted, tensors are joined instead.
    compressed: the compressed keys and values of these tokens, which `NativeSparseAttention` adds.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity, self._length = capacity, 0
        self.compressed: KeyValueCache | None = None
        # [2, B, capacity, K, D], of keys and of values.
        self._memory: Tensor | None = None

    def __len__(self) -> int:
        """N, the tokens so far."""
        return self._length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append M tokens [B, M, K, D]; return all keys and values [B, N + M, K, D] as views.

        Raises ValueError if shape, dtype or device differ from the earlier tokens.
        """
        memory = key[None] if self._memory is None else self._memory
        if not torch.compiler.is_compiling() and memory.is_inference() and not torch.is_inference_mode_enabled():
            # Of earlier tokens in inference mode, whose tensors can neither be written to nor saved outside of it.
            self._memory = memory = memory.clone()
        kinds = {(x.shape[-4:-3], x.shape[-2:], x.dtype, x.device) for x in (key, value, memory)}
        if key.ndim != 4 or key.shape != value.shape or len(kinds) > 1:
            before = "" if self._memory is None else f" as those before, {memory.dtype} [{memory.shape[1]}, N, ·, ·]"
            raise ValueError(
                f"key {key.dtype} {tuple(key.shape)} and value {value.dtype} {tuple(value.shape)} must be [B, M, K, D] "
                f"of one kind{before}; give each batch its own cache"
            )
        first, self._length = self._length, self._length + key.shape[1]
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad or memory.requires_grad):
            new = torch.stack([key, value])
            memory = new if self._memory is None else torch.cat([memory[:, :, :first], new], 2)
        else:
            if self._memory is None or memory.requires_grad or self._length > memory.shape[2]:
                self.capacity = max(self.capacity, 2 * first, self._length)
                earlier, memory = memory, key.new_empty((2, key.shape[0], self.capacity, *key.shape[2:]))
                memory[:, :, :first] = earlier[:, :, :first]
            memory[0, :, first : self._length], memory[1, :, first : self._length] = key, value
        self._memory = memory
        # Without gradients, views of which autograd counts no writes: those of later tokens are behind them.
        keys, values = (memory if memory.requires_grad else memory.data)[:, :, : self._length].unbind(0)
        return keys, values
