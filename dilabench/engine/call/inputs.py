"""Random inputs of a workload, made once per workload group and shared by its implementations."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilabench.workload.spec import Workload

TORCH_DTYPE = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


# Distant in the last 32 bits, the only ones that torch's CPU generator uses.
SEED_STEP, SEEDS = 0x9E3779B1, 2**32


# Values at the start of a tensor that keep their signs when all others change (`ChangeLog`).
SAME_VALUES = 64
# Rows of D values that are drawn together: what a check draws again must not take the memory of a whole tensor.
DRAWN_ROWS = 2**16
# Rows of a digest that are summed together.
DIGEST_ROWS = 2**20
# Odd, so that multiplying by its multiples loses no bit of a word; the golden ratio's spread over all of them.
DIGEST_STEP = 0x1E3779B97F4A7C15


class ChangeLog:
    """The changes made to some tensors, from which the values before them follow.

    A change multiplies the last axis of a whole tensor by signs or redraws all of it (`draw`), its first SAME_VALUES
    values excepted, or overwrites a row. A tensor that is redrawn has no other changes. `now` counts the changes;
    `earlier` gives the values at such a count. The changes are dropped once `holders` holds no count.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[int, tuple[int, int] | None, Tensor]] = []
        # (number of the change, index of the tensor, seed)
        self._drawn: list[tuple[int, int, int]] = []
        self.holders: set[Hashable] = set()

    @property
    def now(self) -> int:
        """The number of changes so far."""
        return len(self._changes)

    def multiplied(self, index: int, signs: Tensor) -> None:
        """Tensor number `index` was multiplied by signs [D]."""
        self._add(index, None, signs)

    def overwritten(self, index: int, batch: int, row: int, old: Tensor) -> None:
        """A row of tensor number `index` was overwritten; `old` [..., D] is a copy of what it held."""
        self._add(index, (batch, row), old)

    def drawn(self, index: int, seed: int) -> None:
        """Tensor number `index` was redrawn from a seed."""
        if self.holders:
            self._drawn.append((self.now, index, seed))
        else:
            self._drawn.clear()
        self._add(index, None, torch.empty(0))

    def _add(self, index: int, place: tuple[int, int] | None, values: Tensor) -> None:
        if self.holders:
            self._changes.append((index, place, values))
        else:
            self._changes.clear()

    def earlier(self, index: int, tensor: Tensor, count: int, batch: int, head: int, row: int | None = None) -> Tensor:
        """A copy [N, D] of one head of tensor number `index`, [B, N, H, D], as it was when `now` was `count`.

        row: of this row alone, [1, D].
        """
        return earlier_heads(index, [Moment(tensor, self, count, batch, head, row)])[0]

    def since(self, index: int, count: int) -> list[tuple[int, tuple[int, int] | None]]:
        """The changes of tensor number `index` after the first `count`: number and place, None for the whole tensor."""
        return [
            (number, place)
            for number, (changed, place, _) in enumerate(self._changes[count:], count)
            if changed == index
        ]

    def values(self, number: int) -> Tensor:
        """The signs [D], or the old row [..., D], of a change."""
        return self._changes[number][2]

    def seed_before(self, index: int, count: int) -> tuple[bool, int | None]:
        """Whether tensor number `index` is redrawn by seeds, and that of the last draw before `count` if it was drawn
        again since then.
        """
        seeds = [(number < count, seed) for number, at, seed in self._drawn if at == index]
        if not seeds or seeds[-1][0]:
            return bool(seeds), None
        return True, [seed for is_before, seed in seeds if is_before][-1]


class Moment(NamedTuple):
    """One head of one batch item of a tensor [B, N, H, D], when `changes.now` was `at`; row: of this row alone."""

    tensor: Tensor
    changes: ChangeLog
    at: int
    batch: int
    head: int
    row: int | None = None


def earlier_heads(index: int, moments: Sequence[Moment]) -> Tensor:
    """Copies [I, N, D] of heads of tensors number `index` of their sets, or of single rows [I, 1, D], as they were.

    Either all moments are of rows or none is. Operators are the same for all moments, whatever their changes.
    """
    found = []
    for tensor, _, _, batch, head, row in moments:
        found.append(tensor.detach()[batch, slice(None) if row is None else slice(row, row + 1), head])
    x = torch.stack(found)
    # Sign patterns by address, as few of them change tensors again and again; which of them each product has.
    patterns: dict[int, tuple[int, Tensor]] = {}
    products: list[list[int]] = []
    # Rows that were overwritten: item, row, its values, the signs before it.
    places: list[tuple[int, int]] = []
    values: list[Tensor] = []
    for item, (tensor, changes, count, batch, head, row) in enumerate(moments):
        is_drawn, seed = changes.seed_before(index, count)
        if is_drawn:
            if seed is not None:
                drawn_head(x[item], tensor, seed, batch, head, row or 0)
            continue
        signs: list[int] = []
        first: dict[int, list[int]] = {}
        for number, place in changes.since(index, count):
            changed = changes.values(number)
            if place is None:
                signs.append(patterns.setdefault(changed.data_ptr(), (len(patterns), changed))[0])
            elif place[0] == batch and place[1] not in first and row in (None, place[1]):
                first[place[1]] = [*signs]
                places.append((item, place[1] - (row or 0)))
                values.append(changed.reshape(tensor.shape[2:])[head])
        products += [[item, -1, *signs], *([item, at - (row or 0), *before] for at, before in first.items())]
    if values:
        item_of, at = torch.tensor(places, device=x.device).T
        x[item_of, at] = torch.stack(values)
    if patterns:
        _change_signs(x, moments, products, torch.stack([signs for _, signs in patterns.values()]))
    return x


def _change_signs(x: Tensor, moments: Sequence[Moment], products: Sequence[Sequence[int]], patterns: Tensor) -> None:
    """Multiply items of x [I, N, D], and rows of them, by products of patterns [P, D] of signs: (item, row, pattern,
    ...); row -1 stands for all rows of the item that no product names.
    """
    odd = np.zeros((len(products), len(patterns)), np.float32)
    for number, (_, _, *factors) in enumerate(products):
        for factor in factors:
            odd[number, factor] = 1 - odd[number, factor]
    negative = torch.from_numpy(odd).to(x.device) @ (patterns < 0).float()
    signs = (1 - 2 * negative.remainder_(2)).to(x.dtype)
    # The first values of the whole tensor keep their signs; in a small tensor they span several batch items.
    same = _kept_signs(x, moments)
    before = x[:, : same.shape[1]].clone()
    whole = [number for number, (_, row, *_) in enumerate(products) if row < 0]
    single = [number for number, (_, row, *_) in enumerate(products) if row >= 0]
    by_item = signs.new_ones(len(x), 1, x.shape[2])
    by_item[[products[number][0] for number in whole], 0] = signs[whole]
    if single:
        item_of, at = torch.tensor([products[number][:2] for number in single], device=x.device).T
        rows = x[item_of, at] * signs[single]
        x.mul_(by_item)
        x[item_of, at] = rows
    else:
        x.mul_(by_item)
    if same.size:
        x[:, : same.shape[1]] = torch.where(torch.from_numpy(same).to(x.device), before, x[:, : same.shape[1]])


def _kept_signs(x: Tensor, moments: Sequence[Moment]) -> NDArray[np.bool_]:
    """[I, R, D]: which values of the first R rows of x are among the first SAME_VALUES of their whole tensor."""
    tensor = moments[0].tensor
    length, heads, width = tensor.shape[1:]
    begins = np.array([(moment.batch * length + (moment.row or 0)) * heads + moment.head for moment in moments])
    reached = max(0, -(-(SAME_VALUES - int(begins.min()) * width) // (heads * width)))
    flat = (begins[:, None] + np.arange(min(reached, x.shape[1])) * heads)[..., None] * width + np.arange(width)
    same: NDArray[np.bool_] = flat < SAME_VALUES
    return same


def draw(x: Tensor, seed: int) -> None:
    """Draw all of x [B, N, ...] (packed: [T, ...]) but its first SAME_VALUES values from a standard normal."""
    first = x.view(-1)[:SAME_VALUES].clone()
    for number, piece in enumerate(x.view(-1, x.shape[-1]).split(DRAWN_ROWS)):
        _draw_piece(piece, seed, number)
    x.view(-1)[:SAME_VALUES] = first


def drawn_head(x: Tensor, like: Tensor, seed: int, batch: int, head: int, begin: int) -> None:
    """Write into x [R, D] what `draw` gave rows of a head of `like` [B, N, H, D] from `begin` on, a piece at a time."""
    length, heads, width = like.shape[1:]
    wanted = (batch * length + begin + torch.arange(len(x), device=x.device)) * heads + head
    total = like.numel() // width
    for number, start in enumerate(range(0, total, DRAWN_ROWS)):
        here = (wanted >= start) & (wanted < start + DRAWN_ROWS)
        if here.any():
            piece = x.new_empty(min(DRAWN_ROWS, total - start), width)
            _draw_piece(piece, seed, number)
            x[here] = piece[wanted[here] - start]
    flat = wanted[:, None] * width + torch.arange(width, device=x.device)
    same = flat < SAME_VALUES
    x[same] = like.detach().reshape(-1)[flat[same]]


def _draw_piece(piece: Tensor, seed: int, number: int) -> None:
    generator = torch.Generator(piece.device).manual_seed((seed + number * SEED_STEP) % SEEDS)
    piece.normal_(generator=generator)


@dataclass(frozen=True, slots=True)
class InputSet:
    """q [B, M, H, D], k [B, N, K, D] and v [B, N, K, Dv], M = N unless the workload has `query_len`; or three times the
    same embeddings [B, N, H·D], of a model [B, M, E].

    changes: what was done to the `distinct` tensors between timed calls.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    changes: ChangeLog = field(default_factory=ChangeLog, compare=False, repr=False)

    @property
    def distinct(self) -> tuple[Tensor, ...]:
        """The tensors, each once."""
        return tuple({id(tensor): tensor for tensor in (self.q, self.k, self.v)}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct tensors."""
        return sum(tensor.nbytes for tensor in self.distinct)

    def copy(self) -> "InputSet":
        """The same numbers in separate tensors."""
        copies = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.distinct}
        return InputSet(copies[id(self.q)], copies[id(self.k)], copies[id(self.v)])


def input_shapes(workload: Workload, takes: str, rows: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k, v: [B, M, H, D], [B, N, K, D] and [B, N, K, Dv], packed [T, ·, ·]; embeddings: one [B, N, H·D],
    of a model [B, M, E].

    `rows`: of the shards of a rank that holds this many positions.
    """
    rows = workload.seq_len if rows is None else rows
    lead = () if workload.layout == "packed" else (workload.batch_size,)
    if takes == "embeddings":
        return ((*lead, rows, workload.num_heads * workload.head_dim),)
    if takes == "model":
        assert workload.model is not None
        return ((*lead, workload.query_len or rows, workload.model.width),)
    query = (*lead, workload.query_len or rows, workload.num_heads, workload.head_dim)
    key = (*lead, rows, workload.num_kv_heads, workload.head_dim)
    return query, key, (*key[:-1], workload.value_width)


def result_form(workload: Workload, takes: str, query: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the result of a call with this first input: the input's, with the width of values, or of a
    model the losses [B, N, 1], at least in float32, or the logits [B, M, V] of M last tokens.
    """
    if takes == "heads":
        return torch.Size((*query.shape[:-1], workload.value_width)), query.dtype
    if takes == "model" and workload.model is not None and workload.query_len is not None:
        return torch.Size((*query.shape[:-1], workload.model.vocabulary)), query.dtype
    if takes != "model" or workload.mode == "forward":
        return query.shape, query.dtype
    return torch.Size((*query.shape[:-1], 1)), torch.promote_types(query.dtype, torch.float32)


def make_inputs(workload: Workload, takes: str, seed: int, device: torch.device, rows: int | None = None) -> InputSet:
    """Standard normal inputs. The same seed gives the same numbers on the same kind of device.

    `rows`: the shards of a rank that holds this many positions, drawn without the whole tensors.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPE[workload.dtype]
    wants_grad = workload.mode != "forward"
    made = [
        torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_(wants_grad)
        for shape in input_shapes(workload, takes, rows)
    ]
    q, k, v = made if len(made) == 3 else made * 3
    return InputSet(q, k, v)


def rank_seed(seed: int, rank: int) -> int:
    """The seed of a rank's shards; rank 0 has the seed of a single device."""
    return (seed + rank * SEED_STEP) % SEEDS


class InputStore:
    """The input sets of one workload. Asking for another workload's frees them, so that memory holds one only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workload: Workload | None = None
        self._sets: dict[tuple[str, int], InputSet] = {}

    def get(self, workload: Workload, takes: str, seed: int) -> InputSet:
        """The set of a seed."""
        if workload != self._workload:
            self._sets.clear()
            self._workload = workload
        key = (takes, seed)
        if key not in self._sets:
            self._sets[key] = make_inputs(workload, takes, seed, self._device)
        return self._sets[key]

    def clear(self) -> None:
        """Forget all sets."""
        self._sets.clear()
        self._workload = None


def dout_signs(dout: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Signs of the rows, [B, N, 1, 1], and of the channels, [D], of dout, [B, N, H, D] or [B, N, E].

    A backward pass is linear in dout, so that the gradients for signs of channels alone would follow from few others.
    """
    generator = torch.Generator(dout.device).manual_seed(seed)
    rows, channels = (
        torch.randint(0, 2, shape, generator=generator, device=dout.device, dtype=torch.int8) * 2 - 1
        for shape in (dout.shape[:2], dout.shape[-1:])
    )
    return rows.view(*rows.shape, *[1] * (dout.ndim - 2)), channels


def fast_digest(tensor: Tensor) -> Tensor:
    """Sums of the bits of both halves of each row, multiplied by an odd number of each row and summed: one pass over
    memory, and two words for `DIGEST_ROWS` rows.
    """
    tensor = tensor.detach()
    width = tensor.shape[-1] * tensor.element_size()
    fits = [word for word in (torch.int64, torch.int32, torch.int16) if width % word.itemsize == 0]
    bits = tensor.view(next(word for word in fits if word.itemsize >= tensor.element_size()))
    half = bits.shape[-1] // 2
    words = []
    for piece in bits.flatten(0, -2).split(DIGEST_ROWS):
        factors = torch.arange(1, len(piece) + 1, device=piece.device).mul_(DIGEST_STEP).bitwise_or_(1)
        words += [(part.sum(-1) * factors).sum() for part in (piece[:, :half], piece[:, half:])]
    return torch.stack(words)
