"""What goes on around the calls that are timed: other numbers at the same addresses, and one call's result kept.

All of it happens between samples. In a timed region there is nothing but the call, and for the one call of a slot that
was chosen at random, before it began, the store of a reference to its result.
"""

from __future__ import annotations

import _thread
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dilabench.engine.call.inputs import InputSet

# Left as they are when contents change, so that a cache that looks at the first values only is found.
SAME_VALUES = 64
SIGN_PATTERNS = 16
NOISE_ROWS = 8
# Share of the time between two changes of a row, and between two of all numbers, that one such change may take.
CHANGE_SHARE = 0.0075

# Where a rank holds a position of the whole sequence: its local row, None for other ranks' positions.
LocalRow = Callable[[int], int | None]


@dataclass(slots=True, eq=False)
class KeptCall:
    """One call of the timed sequence, and what it was given and gave.

    position: the row of q that was changed just before it. threads: that calls of its slot left running. rows: copies
    of some rows of out, made as soon as the clock had stopped, and `places` where they stand.
    """

    inputs: InputSet
    position: int
    out: object = None
    gradients: tuple[Tensor | None, ...] = ()
    made: bool = False
    threads: int = 0
    rows: Tensor | None = None
    places: Tensor | None = None
    undo: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def keep(self, out: object, gradients: tuple[Tensor | None, ...] = ()) -> object:
        """Remember the results; gives back what the call would have returned."""
        self.out, self.gradients, self.made = out, gradients, True
        return gradients or out

    def restore_inputs(self) -> None:
        """Give the inputs the numbers again that the call saw."""
        for row, old in reversed(self.undo):
            row.copy_(old)
        self.undo.clear()


class TimedCalls:
    """Between `begin` and `end`, `before` is asked before each call that may be timed.

    Slots begin with other numbers in all inputs: the signs of their channels are drawn anew, so that they stay normally
    distributed and cost one pass over memory. Before a call one row of q, of k and of v gets fresh random numbers. Both
    happen as often as they may take time (CHANGE_SHARE), whether a result of the slot is looked at or not, and bypass
    autograd's version counters. Over ranks both happen before every call, so that a message of an earlier call is wrong
    in all its numbers; all ranks draw the same, and each writes what it holds.
    """

    def __init__(self, seed: int, length: int, row_dim: int, local_row: LocalRow | None = None) -> None:
        self._choice, self._places = random.Random(f"choice {seed}"), random.Random(f"places {seed}")
        self._seed, self._length, self._row_dim = seed, length, row_dim
        self._local_row = local_row
        self._noise: dict[tuple[torch.device, torch.dtype, torch.Size], tuple[Tensor, Tensor]] = {}
        self._used: set[int] = set()
        self._calls = 0
        self._threads = self._left = 0
        self._touched_at = self._touch_s = self._renewed_at = self._renew_s = 0.0
        self._kept: KeptCall | None = None
        self._last, self._keeps = False, True
        self.active = False

    def begin(self, last: bool = False, keeps: bool = True) -> None:
        """A slot begins, of which a random call is kept if it `keeps` one. Of the last one of all, it is the last call,
        and a row is changed before each."""
        self._last, self._keeps = last, keeps
        self._used.clear()
        self._calls, self._kept = 0, None
        self._threads, self._left = _thread._count(), 0
        self.active = True

    def before(self, inputs: InputSet, *, fixed: bool = False) -> KeptCall | None:
        """Change the inputs of the next call unless they are `fixed`; where its result is to be kept, what keeps it."""
        self._settle()
        if fixed:
            position = self._length - 1
        elif self._may_renew(inputs) and self._due(self._renewed_at, self._renew_s):
            self._renewed_at = time.perf_counter()
            self.renew(inputs)
            self._renew_s = time.perf_counter() - self._renewed_at
            position = self._touch(inputs)
        elif self._due(self._touched_at, self._touch_s):
            position = self._touch(inputs)
        else:
            position = self._length - 1
        self._calls += 1
        # Each of the calls so far with the same probability, however many there will be.
        if not self._keeps or (not self._last and self._choice.random() * self._calls >= 1):
            return None
        self._kept = KeptCall(inputs, position)
        return self._kept

    @property
    def drawn(self) -> tuple[object, ...]:
        """What all draws so far depend on: the same on every rank, or ranks change different rows."""
        return self._choice.getstate(), self._places.getstate()

    def _may_renew(self, inputs: InputSet) -> bool:
        """Whether no kept call needs the numbers in these inputs: none of the slot had them, or, over ranks, where only
        the last slot keeps calls and each call replaces the one before as the kept one, always."""
        if self._local_row is not None:
            return True
        first = id(inputs) not in self._used
        self._used.add(id(inputs))
        return first

    def end(self) -> KeptCall | None:
        """The slot is over: the kept call, None where no call was made through `before`."""
        self._settle()
        kept, self._kept, self.active = self._kept, None, False
        if kept is None or not kept.made:
            return None
        kept.threads = self._left
        return kept

    @contextmanager
    def slot(self) -> Iterator[None]:
        """`begin` and `end` of calls of which none is looked at."""
        self.begin(keeps=False)
        try:
            yield
        finally:
            self.end()

    def renew(self, inputs: InputSet) -> None:
        """Other numbers in all inputs, outside a slot."""
        for tensor in inputs.distinct:
            self._renew(tensor.data)

    def renew_gradient(self, dout: Tensor) -> None:
        """Other signs in the channels of dout, over ranks before every call: no kept call needs an earlier one."""
        self._renew(dout)

    def _settle(self) -> None:
        """Right after a call: which threads it left, and of the kept one, what stands in its result now."""
        # Of any call: on a busy machine one may have ended before anybody looks.
        self._left = max(self._left, _thread._count() - self._threads)
        kept = self._kept
        if kept is None or not kept.made:
            return
        if kept.rows is None and type(kept.out) is Tensor and kept.out.dim() > self._row_dim:
            length = kept.out.shape[self._row_dim]
            wanted = {self._local(kept.position), length // 2, length - 1} - {None}
            kept.places = torch.tensor(sorted(row for row in wanted if row is not None and 0 <= row < length))
            kept.rows = kept.out.detach().index_select(self._row_dim, kept.places.to(kept.out.device))

    def _due(self, before: float, took_s: float) -> bool:
        """Whether a change that took so long, the time before, may be made again."""
        # Ranks must not decide by their own clocks.
        if self._last or self._local_row is not None:
            return True
        return time.perf_counter() - before > took_s / CHANGE_SHARE

    def _touch(self, inputs: InputSet) -> int:
        """Fresh numbers in a row of each tensor; the position of that of the first."""
        self._touched_at = started = time.perf_counter()
        logged = self._kept is not None and self._kept.made and self._kept.inputs is inputs
        positions = []
        for tensor in inputs.distinct:
            # The first values stay (SAME_VALUES).
            position = self._places.randrange(min(1, self._length - 1), self._length)
            positions.append(position)
            batch = self._places.randrange(tensor.shape[0]) if self._row_dim else 0
            number = self._places.randrange(NOISE_ROWS)
            local = self._local(position)
            if local is None:
                continue
            data = tensor.data
            row = data[batch, local] if self._row_dim else data[local]
            if logged and self._kept is not None:
                self._kept.undo.append((row, row.clone()))
            row.copy_(self._random_numbers(data)[0][number])
        self._touch_s = time.perf_counter() - started
        return positions[0]

    def _renew(self, data: Tensor) -> None:
        first = data.view(-1)[:SAME_VALUES].clone()
        data.mul_(self._random_numbers(data)[1][self._places.randrange(SIGN_PATTERNS)])
        data.view(-1)[:SAME_VALUES] = first

    def _random_numbers(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of normal numbers, and patterns of signs of the last axis, for tensors of this kind."""
        row = data.shape[self._row_dim + 1 :]
        key = data.device, data.dtype, row
        if key not in self._noise:
            generator = torch.Generator().manual_seed(self._seed)
            rows = torch.randn((NOISE_ROWS, *row), generator=generator)
            signs = torch.randint(0, 2, (SIGN_PATTERNS, row[-1]), generator=generator) * 2 - 1
            self._noise[key] = rows.to(data.device, data.dtype), signs.to(data.device, data.dtype)
        return self._noise[key]

    def _local(self, position: int) -> int | None:
        return position if self._local_row is None else self._local_row(position)
