"""Keys that each stand for a block of tokens: the compressed branch of NSA (Yuan et al. 2025, equation 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import model_validator

from dilabench.patterns.answers import HiddenRows, SequenceShape
from dilabench.patterns.hidden_rows import HiddenRowsPattern

if TYPE_CHECKING:
    from dilabench.patterns.answers import Positions


@dataclass(frozen=True, slots=True)
class Compression:
    """Compressed keys: number c stands for the `length` tokens from c · `stride` on, which is a multiple of `stride`.

    Raises ValueError for other lengths.
    """

    length: int
    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1 or self.length < self.stride or self.length % self.stride:
            raise ValueError(
                f"compressed blocks of {self.length} tokens, one every {self.stride}: the length must be a multiple of "
                "the stride"
            )

    def count(self, tokens: int) -> int:
        """Whole blocks of a sequence."""
        return max(0, (tokens - self.length) // self.stride + 1)

    def lasts(self, tokens: int) -> Positions:
        """[C]: the last token of each block, from which on a causal mask shows it."""
        return np.arange(self.count(tokens)) * self.stride + self.length - 1


class CompressedKeysPattern(HiddenRowsPattern):
    """C[h, i, c] = 1 if the tokens of compressed key c end at token i or before it. Keys are no tokens."""

    kind: Literal["compressed_keys"] = "compressed_keys"
    length: int
    stride: int

    @model_validator(mode="after")
    def _possible(self) -> Self:
        Compression(self.length, self.stride)
        return self

    @property
    def compresses(self) -> Compression:
        """The blocks of tokens."""
        return Compression(self.length, self.stride)

    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """Each key is hidden from the tokens before the last one that it stands for."""
        lasts = self.compresses.lasts(shape.length)
        return HiddenRows.of(shape.length, (np.zeros_like(lasts), lasts))
