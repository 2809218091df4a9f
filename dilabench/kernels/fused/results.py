"""What the forward launch of a group of branches writes, and beside what."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor


class Results(NamedTuple):
    """``out`` [B, N, H, D] and ``lse`` [B, H, N], of which rows that the group does not cover are left as they are.

    mass: [1, H, N], the logarithm of a null mass that counts as a key of value 0. merge: with what is there. follows:
    directly behind the launch of another group, beside whose end it begins. compact: out [B, n, H, D] and lse [B, H, n]
    hold the `BranchGroup.stored_rows` of one class of each head, the only one that a single branch covers.
    """

    out: Tensor
    lse: Tensor
    mass: Tensor | None = None
    merge: bool = False
    follows: bool = False
    compact: bool = False

    @property
    def compiled_for(self) -> tuple[Hashable, ...]:
        """What kernels are compiled for of them, besides the shape of out."""
        return self.out.dtype, self.mass is None, self.merge, self.follows, self.compact
