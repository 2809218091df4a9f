"""The work around timed calls: other numbers at the same addresses, and kept rows of some results.

All of it happens between samples. A timed region holds only the call and, once it has returned, a draw of whether its
result is kept, which is the same for every call. The rows to copy are drawn later from the system's randomness, and
compared with the oracle after the last slot.
"""

from __future__ import annotations

import _thread
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import torch
from torch import Tensor

from dilabench.distributed.world import World
from dilabench.engine.call.digests import fast_digest
from dilabench.engine.call.inputs import SAME_VALUES, ChangeLog, InputSet, dout_signs, draw, result_form
from dilabench.engine.call.kept_call import KeptCall, KeptRow
from dilabench.engine.call.left_threads import working_threads
from dilabench.engine.call.returned import not_plain
from dilabench.workload.spec import Workload

SIGN_PATTERNS = 16
NOISE_ROWS = 8
# Share of the time between two changes of a row, and between two of all numbers, that one such change may take.
CHANGE_SHARE = 0.0075
# Calls of a timing whose rows are kept: each call with the same probability, 8 to 16 of them, or all if there are
# fewer. A result that is wrong half of the time is found with 99.6 % by 8 and with 99.998 % by 16.
MOST_KEPT = 16
# The first of a slot's samples, at random, before which all numbers may change.
RENEWED_AMONG = 4
# The least samples of a slot in which one can have a neighbour before and one after it.
COMPARED = 3
SEED_BITS = 60

# The local row of a position of the whole sequence; None for other ranks' positions.
LocalRow = Callable[[int], int | None]


class TimedCalls:
    """Between `begin` and `end`, `before` is asked before each call that may be timed.

    At a random sample of a slot all inputs get other numbers: the signs of their channels are redrawn, so that they
    stay normally distributed and cost one pass over memory. Of a sample of `batch` calls, each on an input set of its
    own, all sets do. Before a call one row of q, of k and of v gets fresh random numbers. Both happen as often as they
    may take time (CHANGE_SHARE), and bypass autograd's version counters. In slots of fewer than `COMPARED` samples, in
    which no sample has neighbours to be compared with, all inputs change before every sample.

    Over ranks all numbers of all inputs are redrawn before every call, each rank's from a seed of its own
    (`own_seeds`; ranks that hold the same tensors draw the same). What a rank knows of another's numbers, from earlier
    calls or its own, then saves it no message.
    """

    def __init__(
        self,
        seed: int,
        workload: Workload,
        takes: str = "heads",
        local_row: LocalRow | None = None,
        *,
        own_seeds: bool = True,
    ) -> None:
        self._workload, self._takes, self._seed = workload, takes, seed
        self._length, self._row_dim = workload.seq_len, 0 if workload.layout == "packed" else 1
        self._local_row, self._own_seeds = local_row, own_seeds
        self._places = random.Random(f"places {seed}")
        # Ranks draw alike: `begin` gives them a seed that one of them has drawn.
        self._choice: random.Random = random.SystemRandom() if local_row is None else random.Random(f"choice {seed}")
        self._quick = random.Random(secrets.randbits(SEED_BITS))  # in the timed region, which must not wait
        self._noise: dict[tuple[torch.device, torch.dtype, torch.Size], tuple[Tensor, Tensor]] = {}
        self._deck: list[tuple[int, int]] = []
        self._calls = self._renew_from = 0
        # Calls of a sample; and whether the inputs of this sample's calls change.
        self.batch, self._renewing, self._always = 1, False, False
        self._threads = self._left = 0
        self._touched_at = self._renewed_at = _now()
        self._touch_s = self._renew_s = 0.0
        self._last, self._keeps = False, True
        self._rows, self._holds = 1, True
        self._full: KeptCall | None = None
        self._waiting: list[KeptCall] = []
        self._held: KeptCall | None = None
        self._kept: list[KeptCall] = []
        self._row_share = self._digest_share = 1.0
        self._number = 0
        # In this slot: calls before which all numbers, or a row, changed; and those that were never made.
        self.renewed: list[int] = []
        self.changed: list[int] = []
        self.unmade = 0
        # Of the signs that dout has now (`dout_signs`), None before its first change.
        self._dout_seed: int | None = None
        self._logs: set[ChangeLog] = set()
        self.active = False

    def begin(
        self,
        last: bool = False,
        keeps: bool = True,
        count: int = RENEWED_AMONG,
        seed: int | None = None,
        *,
        rows: int = 1,
        holds: bool = True,
    ) -> None:
        """A slot of about `count` calls begins; rows of random ones are kept if it `keeps` any. In the last slot of the
        timing, the whole result of the last call is kept, and a row is changed before each call. seed: the same on all
        ranks. rows: number of random rows of each kept call. holds: a result stays until the next call is over, to see
        whether that call writes into it; else only its rows stay.
        """
        self._rows, self._holds = rows, holds
        self._last, self._keeps = last, keeps
        if self._local_row is not None and seed is not None:
            self._choice = random.Random(seed)
        self._always = self._local_row is not None or (keeps and count < COMPARED)
        # One with neighbours on both sides.
        drawn = 0 if self._always else self._choice.randrange(max(1, min(count - 2, RENEWED_AMONG)))
        self._renew_from = drawn if self._always else drawn + (count >= COMPARED)
        self._calls, self._full = 0, None
        self.renewed.clear()
        self.changed.clear()
        self._threads, self._left = working_threads(), 0
        self.active = True

    def before(self, inputs: InputSet, *, fixed: bool = False) -> KeptCall:
        """Change the inputs of the next call unless they are `fixed`; return its keeper. Outside a slot do nothing."""
        batch, position = 0, self._workload.rows - 1
        if not self.active:
            return KeptCall(inputs, position)
        self._settle()
        if self._keeps:
            inputs.changes.holders.add(self)
            self._logs.add(inputs.changes)
        if not fixed:
            sample, first = self._calls // self.batch, self._calls % self.batch == 0
            if first:
                # Inputs of calls that take batches are small.
                is_due = self._always or self.batch > 1 or self._due(self._renewed_at, self._renew_s)
                self._renewing = sample >= self._renew_from and is_due
            if self._renewing:
                started, _ = now = _now()
                self.renew(inputs)
                self._renew_s = min(self._renew_s or inf, time.perf_counter() - started)
                if first:
                    self._renewed_at = now
                    self.renewed.append(self._calls)
                    self._renew_from = sample + (1 if self._always else RENEWED_AMONG)
                batch, position = self._any_row(inputs) if self._local_row is not None else self._touch(inputs)
            elif self._last or self._due(self._touched_at, self._touch_s):
                batch, position = self._touch(inputs)
                self.changed.append(self._calls)
        for call in self._waiting:
            if call.inputs is inputs and call.digests:
                self._digest(call, again=True)
        self._calls += 1
        if not self._keeps:
            return KeptCall(inputs, position, batch)
        kept = KeptCall(inputs, position, batch, self._number, self._drawn, whole=self._last)
        self._number += 1
        self._waiting.append(kept)
        # A digest takes a pass over the inputs, so that this choice is made before the call, unlike that of its rows.
        if not kept.number or self._choice.random() < self._digest_share:
            self._digest(kept, again=True)
            self._thin_out_digests()
        if self._last:
            if self._full is not None:
                self._full.gradients = ()
            self._full = kept
        return kept

    def _drawn(self, call: KeptCall) -> bool:
        """Draw whether rows of a call that has returned are kept; the first call's always are."""
        # Of a batch, all of which is asked for before the first call, no more results are stored than are kept.
        share = self._row_share * min(1.0, MOST_KEPT / max(1, len(self._waiting)))
        # All ranks draw the same.
        return not call.number or (self._quick if self._local_row is None else self._choice).random() < share

    def _thin_out_rows(self) -> None:
        """If rows of too many calls are kept, forget half of them at random, and keep later ones half as often."""
        drawn = [call for call in self._kept if call.drawn]
        if len(drawn) > MOST_KEPT:
            self._row_share /= 2
            for call in self._half_of(drawn):
                call.drawn = False
                call.rows.clear()

    def _thin_out_digests(self) -> None:
        digested = [call for call in (*self._kept, *self._waiting) if call.digests]
        if len(digested) > MOST_KEPT:
            self._digest_share /= 2
            for call in self._half_of(digested):
                call.digests.clear()

    def _half_of(self, calls: list[KeptCall]) -> list[KeptCall]:
        calls = [call for call in calls if call.number]
        self._choice.shuffle(calls)
        return calls[len(calls) // 2 :]

    @property
    def drawn(self) -> tuple[object, ...]:
        """The state of all draws: it must be equal on all ranks, which otherwise change different rows."""
        return self._choice.getstate(), self._places.getstate()

    @property
    def calls(self) -> int:
        """The calls of this slot so far."""
        return self._calls

    def end(self) -> KeptCall | None:
        """The slot is over: of the last one the last call, None if there was none or it was not made."""
        self._settle()
        self._let_go()
        full, self._full, self.active = self._full, None, False
        self.unmade = sum(not call.made for call in {*self._waiting, *([] if full is None else [full])})
        self._waiting = []
        if full is None or not full.made:
            return None
        full.threads = self._left
        return full

    def take_kept(self) -> list[KeptCall]:
        """The calls of this timing whose rows or digests were kept, latest last; the next timing begins with none."""
        kept, self._kept, self._number = self._kept, [], 0
        self._row_share = self._digest_share = 1.0
        return [call for call in kept if call.drawn or call.digests]

    def release(self) -> None:
        """Forget the inputs of the calls so far."""
        for changes in self._logs:
            changes.holders.discard(self)
        self._logs.clear()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """`begin` and `end` of calls that are not checked."""
        self.begin(keeps=False)
        try:
            yield
        finally:
            self.end()

    def renew(self, inputs: InputSet) -> None:
        """Other numbers in all inputs."""
        for index, tensor in enumerate(inputs.distinct):
            if self._local_row is None:
                inputs.changes.multiplied(index, self._renew(tensor.data))
            else:
                seed = self._seed_of_change()
                draw(tensor.data, seed)
                inputs.changes.drawn(index, seed)

    def renew_gradient(self, dout: Tensor) -> None:
        """Other signs in the rows and channels of dout, from a seed drawn now: no earlier one tells which."""
        self._take_dout_signs(dout, self._dout_seed)
        self._dout_seed = self._seed_of_change()
        self._take_dout_signs(dout, self._dout_seed)

    def earlier_dout(self, dout: Tensor, call: KeptCall, batch: int, head: int, row: int | None = None) -> Tensor:
        """A copy [N, D] of one head of dout, [B, N, H, D], as it was in a kept call; row: of this row alone, [1, D]."""
        rows = slice(None) if row is None else slice(row, row + 1)
        found = dout.detach()[batch, rows, head].clone()
        for seed in (self._dout_seed, call.dout_seed):
            if seed is not None:
                of_rows, of_channels = dout_signs(dout, seed)
                found *= of_rows[batch, rows, 0] * of_channels
        return found

    def _take_dout_signs(self, dout: Tensor, seed: int | None) -> None:
        if seed is not None:
            of_rows, of_channels = dout_signs(dout if self._row_dim else dout[None], seed)
            dout.mul_(of_rows if self._row_dim else of_rows[0]).mul_(of_channels)

    def _settle(self) -> None:
        """Right after a call: which threads it left, and copies of rows of the calls to be kept."""
        # Any call may have ended before the check, on a busy machine.
        if _thread._count() > self._threads:
            self._left = max(self._left, working_threads() - self._threads)
        made = [call for call in self._waiting if call.made]
        self._waiting = [call for call in self._waiting if not call.made]
        for call in made:
            self._let_go()
            if call.digests:
                self._digest(call)
            if call.drawn:
                self._copy(call)
            elif call is not self._full:
                call.out, call.gradients = None, ()
            if call.drawn or call.digests:
                self._kept.append(call)
            if call.drawn:
                self._thin_out_rows()

    def _copy(self, call: KeptCall) -> None:
        """Copy rows of its results, drawn now; the first of the query's changed row."""
        workload = self._workload
        call.threads = self._left
        call.count, call.dout_seed = call.inputs.changes.now, self._dout_seed
        call.form = not_plain(call.out) or self._misshapen(call.out, call.inputs)
        gradients, call.gradients = call.gradients, ()
        if call is self._full:
            call.gradients = gradients
        if call.form is not None:
            if call is not self._full:
                call.out = None
            return
        heads, groups = (workload.num_heads, workload.num_kv_heads) if self._takes == "heads" else (1, 1)
        size = heads // groups
        call.rows = [KeptRow(call.batch, call.position, self._choice.randrange(heads))]
        for _ in range(self._rows):
            batch, group = self._next_of_deck(groups)
            drawn = self._choice.randrange(workload.rows)
            call.rows.append(KeptRow(batch, drawn, group * size + self._choice.randrange(size)))
        of_row, of_key = [call.out, *gradients[:1]], list(gradients[1:3])
        if of_key and self._takes == "heads":
            call.rows.append(KeptRow(batch, self._choice.randrange(self._length), group, key=True))
        for row in call.rows:
            local = self._local(row.position)
            if local is not None:
                tensors = of_key if row.key else of_row if self._takes == "heads" else of_row[:1]
                row.copies.extend(self._row(tensor, row, local) for tensor in tensors)
        if self._takes != "heads":
            call.sizes = [None if x is None else torch.linalg.vector_norm(x) for x in gradients]
        if self._holds:
            self._held = call
        elif call is not self._full:
            call.out = None

    def _let_go(self) -> None:
        """Copy the rows of the result that is still held once more, for what has changed since, and let it go."""
        call, self._held = self._held, None
        if call is None:
            return
        for row in call.rows:
            local = self._local(row.position)
            if local is not None and not row.key and not call.overwritten:
                copy = self._row(call.out, row, local)
                row.later.extend([] if copy is None else [copy])
        if call is not self._full:
            call.out = None

    def _row(self, tensor: object, row: KeptRow, local: int) -> Tensor | None:
        if not isinstance(tensor, Tensor):
            return None
        batched = tensor.detach() if self._row_dim else tensor.detach()[None]
        found = batched[row.batch, local, row.head] if self._takes == "heads" else batched[row.batch, local]
        return found.clone()

    def _misshapen(self, out: object, inputs: InputSet) -> str | None:
        assert isinstance(out, Tensor)
        query = inputs.q
        shape, dtype = result_form(self._workload, self._takes, query)
        if (out.shape, out.dtype, out.device) == (shape, dtype, query.device):
            return None
        return f"returned {list(out.shape)} {out.dtype} on {out.device}, not {list(shape)} {dtype} on {query.device}"

    def _next_of_deck(self, groups: int) -> tuple[int, int]:
        """(batch item, head group): each of them once before any comes again."""
        if not self._deck:
            self._deck = [(batch, group) for batch in range(self._workload.batch_size) for group in range(groups)]
            self._choice.shuffle(self._deck)
        return self._deck.pop()

    def _digest(self, call: KeptCall, again: bool = False) -> None:
        """Digest the inputs; before the call, recompute the digest (`again`) if they have changed."""
        if again:
            if call.digested_at == call.inputs.changes.now and call.digests:
                return
            call.digests.clear()
            call.digested_at = call.inputs.changes.now
        call.digests.append([fast_digest(tensor) for tensor in call.inputs.distinct])

    def _due(self, before: tuple[float, float], took_s: float) -> bool:
        """Whether a change that took so long, the time before, may be made again."""
        least_s = took_s / CHANGE_SHARE
        # Ranks must not decide by their own clocks.
        return self._local_row is not None or all(
            now - then > least_s for now, then in zip(_now(), before, strict=True)
        )

    def _touch(self, inputs: InputSet) -> tuple[int, int]:
        """Fresh numbers in a row of each tensor; return batch item and position in the first one."""
        self._touched_at = started, _ = _now()
        places = []
        for index, tensor in enumerate(inputs.distinct):
            # The first values stay (SAME_VALUES).
            length = self._length if index else self._workload.rows
            position = self._places.randrange(min(1, length - 1), length)
            batch = self._places.randrange(tensor.shape[0]) if self._row_dim else 0
            places.append((batch, position))
            number = self._places.randrange(NOISE_ROWS)
            local = self._local(position)
            if local is None:
                continue
            data = tensor.data
            row = data[batch, local] if self._row_dim else data[local]
            if inputs.changes.holders:
                inputs.changes.overwritten(index, batch, local, row.clone())
            row.copy_(self._random_numbers(data)[0][number])
        self._touch_s = min(self._touch_s or inf, time.perf_counter() - started)
        return places[0]

    def _any_row(self, inputs: InputSet) -> tuple[int, int]:
        """Batch item and index of a row of q."""
        batch = self._row_dim and self._places.randrange(inputs.q.shape[0])
        return batch, self._places.randrange(self._workload.rows)

    def _seed_of_change(self) -> int:
        own = self._local_row is not None and self._own_seeds
        return secrets.randbits(SEED_BITS) if own else self._choice.getrandbits(SEED_BITS)

    def _renew(self, data: Tensor) -> Tensor:
        signs = self._random_numbers(data)[1][self._places.randrange(SIGN_PATTERNS)]
        first = data.view(-1)[:SAME_VALUES].clone()
        data.mul_(signs)
        data.view(-1)[:SAME_VALUES] = first
        return signs

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


def _now() -> tuple[float, float]:
    """Seconds of the clock, and those for which this process ran.

    On a busy machine only the clock goes on between two calls. If it alone decided, inputs would change before most
    calls, and a sample on new ones would have no neighbour on old ones to be compared with.
    """
    return time.perf_counter(), time.process_time()


def drawn_together(world: World | None) -> int | None:
    """A seed from the system's randomness, the same on every rank; None without ranks."""
    return None if world is None else world.max_over_ranks([secrets.randbits(SEED_BITS)])[0]
