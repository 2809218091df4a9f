"""One call of the timed sequence, with rows of its results that are compared with the oracle later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from dilabench.engine.call.inputs import InputSet


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A row of one head: of out (and dq), or with `key` of dk and dv. position, head: of the tensor itself.

    copies: the row of each of these tensors right after the call; empty on a rank that does not hold it. later: the
    same of out once the next call, or the slot, was over.
    """

    batch: int
    position: int
    head: int
    key: bool = False
    copies: list[Tensor | None] = field(default_factory=list)
    later: list[Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class KeptCall:
    """One call of the timed sequence, and what it was given and gave.

    draws: says after the call whether its rows are kept (`drawn`). whole: its result is stored anyway. number: of the
    call in its timing, from 0. position, batch: the row of q that was changed just before it. count: of the changes of
    inputs at the time of the call; dout_seed: of the signs of dout then. threads: that calls of its slot left running.
    form: why the result is not one plain tensor of the right shape. digests: of inputs before and after the call, of
    some calls. overwritten: the next call writes into the same result, as replays of a graph do. sizes: the norm of
    each gradient of a module, None if there is none.
    """

    inputs: InputSet
    position: int
    batch: int = 0
    number: int = 0
    draws: Callable[[KeptCall], bool] = field(default=lambda _: False, repr=False)
    whole: bool = False
    drawn: bool = False
    out: object = None
    gradients: tuple[Tensor | None, ...] = ()
    made: bool = False
    threads: int = 0
    count: int | None = None
    dout_seed: int | None = None
    form: str | None = None
    rows: list[KeptRow] = field(default_factory=list)
    digests: list[list[Tensor]] = field(default_factory=list)
    digested_at: int = -1
    sizes: list[Tensor | None] = field(default_factory=list)
    overwritten: bool = False

    def keep(self, out: object, gradients: tuple[Tensor | None, ...] = ()) -> object:
        """Store the results if they are kept; gives back what the call would have returned."""
        self.made, self.drawn = True, self.draws(self)
        if self.drawn or self.whole:
            self.out, self.gradients = out, gradients
        return gradients or out
