"""Rows of K and V that other ranks read: selected, packed, sent and unpacked; dK and dV come back the same way.

A `RowSelection` says which rows of a rank another one reads. `RowExchange` receives each rank's selection packed, from
one rank at a time (a ring) or from all in one collective. `RowGather` receives all in one batch of messages, in place:
each arrives at its place among the gathered rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from dilabench.distributed.exchange import Exchange
from dilabench.distributed.transport.messages import RowsOf
from dilabench.distributed.world import Work, World
from dilabench.impls.ring.schedule.pieces import Piece
from dilabench.impls.ring.schedule.sums import Sum


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Rows [first, stop) of a tensor [B, N, K, D]: all of them (`index` None), or some of their parts.

    parts: 1, or the number of parts, of K/parts heads each, that the heads of a row are selected in. index: int64
    numbers row·parts + part, rows counted from `first`; each once.
    """

    first: int
    stop: int
    index: Tensor | None = None
    parts: int = 1

    def shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of `pack(x)`: [B, selected, K/parts, D]."""
        selected = self.stop - self.first if self.index is None else len(self.index)
        return x.shape[0], selected, x.shape[2] // self.parts, x.shape[3]

    def pack(self, x: Tensor) -> Tensor:
        """The selected part of x [B, N, K, D]; a view of it where whole rows follow each other."""
        rows = self.stop - self.first
        return self.pack_rows(x if rows == x.shape[1] else x.narrow(1, self.first, rows))

    def pack_rows(self, rows: Tensor) -> Tensor:
        """The same of the rows [B, stop - first, K, D] alone."""
        return rows if self.index is None else self._by_part(rows).index_select(1, self.index)

    def unpack(self, packed: Tensor) -> Tensor:
        """Rows [B, stop - first, K, D]. Unselected rows are uninitialised and must not be read."""
        if self.index is None:
            return packed
        B, _, *part = packed.shape
        rows = packed.new_empty(B, (self.stop - self.first) * self.parts, *part).index_copy_(1, self.index, packed)
        return rows.unflatten(1, (-1, self.parts)).flatten(2, 3)

    def add(self, total: Sum, packed: Tensor) -> None:
        """Add what is packed to its rows of a sum."""
        if self.index is None:
            total.put(packed, self.first)
        else:
            rows = total.total()[:, self.first : self.stop]
            self._by_part(rows).index_add_(1, self.index, packed.to(rows.dtype))

    def _by_part(self, rows: Tensor) -> Tensor:
        """Rows [B, R, K, D] as [B, R·parts, K/parts, D]: a view where the heads of a row are contiguous."""
        return rows.unflatten(2, (self.parts, -1)).flatten(1, 2)


def select_rows(pieces: Sequence[Piece], rows: int, num_kv_heads: int, device: torch.device) -> RowSelection | None:
    """The rows of an owner with `rows` rows that the pieces read, each (row, head) once; None if they read none."""
    if not pieces:
        return None
    needed = torch.zeros(rows, num_kv_heads, dtype=torch.bool, device="cpu")
    for piece in pieces:
        piece.mark_keys(needed)
    touched = needed.any(1).nonzero()
    first, stop = int(touched[0]), int(touched[-1]) + 1
    inside = needed[first:stop]
    if bool(inside.all()):
        return RowSelection(first, stop)
    return RowSelection(first, stop, inside.flatten().nonzero().flatten().to(device), num_kv_heads)


Selections = Mapping[int, RowSelection]


@dataclass(slots=True)
class Transfer:
    """K and V of an owner in transit, packed; `packed` is empty without a message."""

    owner: int
    work: Work
    packed: list[Tensor]


@dataclass(frozen=True, slots=True)
class Returned:
    """dK and dV of own rows in transit to this rank, packed, for each selection of these rows."""

    work: Work
    parts: Sequence[tuple[RowSelection, Sequence[Tensor]]]

    def add(self, dk: Sum, dv: Sum) -> None:
        """Wait for them and add them."""
        self.work.wait()
        for selection, packed in self.parts:
            for total, part in zip((dk, dv), packed, strict=True):
                selection.add(total, part)


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Sends K and V to the ranks that read them, and dK and dV back. `silent`: no rank sends anything.

    needs: by owner, the owner's rows that this rank reads. gives: by reader, this rank's rows that the reader reads.
    """

    world: World
    needs: Selections
    gives: Selections
    silent: bool = False

    def fetch(self, distance: int, k: Tensor, v: Tensor) -> Transfer:
        """Receive K and V of the rank `distance` before this one; send the rank `distance` after it what it reads."""
        reader, owner = self._peers(distance)
        sends = {reader: [self.gives[reader].pack(x) for x in (k, v)]} if reader in self.gives else {}
        receives = {owner: _empty_pair(self.needs[owner], k, k.dtype)} if owner in self.needs else {}
        return Transfer(owner, self.world.send_recv(sends, receives, "keys"), receives.get(owner, []))

    def give_back(self, distance: int, gradients: Sequence[Tensor], k: Tensor, dtype: torch.dtype) -> Returned:
        """Receive dK and dV of own rows from the rank `distance` after; send those of the rank before, if any."""
        reader, owner = self._peers(distance)
        sends = {owner: gradients} if gradients else {}
        receives = {reader: _empty_pair(self.gives[reader], k, dtype)} if reader in self.gives else {}
        work = self.world.send_recv(sends, receives, "gradients")
        return Returned(work, [(self.gives[reader], packed) for packed in receives.values()])

    def fetch_all(self, k: Tensor, v: Tensor) -> tuple[Tensor, Work]:
        """K and V of all owners in one flat tensor, which `of_owners` splits."""
        packed = [selection.pack(x) for _, selection in sorted(self.gives.items()) for x in (k, v)]
        return self._all_to_all(packed, self.gives, self.needs, k, k.dtype, "keys")

    def of_owners(self, flat: Tensor, k: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Each owner's rank and packed K and V."""
        return _split(flat, self.needs, k)

    def give_all_back(self, gradients: Sequence[Tensor], k: Tensor, dtype: torch.dtype) -> Returned:
        """dK and dV of own rows from all readers; send owners the packed gradients of their rows, in the order of
        owners.
        """
        flat, work = self._all_to_all(gradients, self.needs, self.gives, k, dtype, "gradients")
        return Returned(work, [(self.gives[reader], packed) for reader, packed in _split(flat, self.gives, k)])

    def _peers(self, distance: int) -> tuple[int, int]:
        rank, size = self.world.rank, self.world.size
        return (rank + distance) % size, (rank - distance) % size

    def _all_to_all(
        self,
        packed: Sequence[Tensor],
        sent: Selections,
        received: Selections,
        like: Tensor,
        dtype: torch.dtype,
        kind: str,
    ) -> tuple[Tensor, Work]:
        flat = torch.cat([x.flatten() for x in packed]) if packed else like.new_empty(0, dtype=dtype)
        if self.silent:
            return flat, Work(())
        input_split_sizes, output_split_sizes = (
            [2 * prod(selections[rank].shape(like)) if rank in selections else 0 for rank in range(self.world.size)]
            for selections in (sent, received)
        )
        return self.world.all_to_all(flat, input_split_sizes, output_split_sizes, kind)


def _empty_pair(selection: RowSelection, like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [like.new_empty(selection.shape(like), dtype=dtype) for _ in range(2)]


def _split(flat: Tensor, selections: Selections, like: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    start = 0
    for rank, selection in sorted(selections.items()):
        shape = selection.shape(like)
        stop = start + 2 * prod(shape)
        yield rank, [x.view(shape) for x in flat[start:stop].chunk(2)]
        start = stop


@dataclass(frozen=True, slots=True)
class RowGather:
    """Rows of other ranks' K and V gathered in two tensors [B, rows, K/parts, D].

    places: by owner, the gathered rows of each of its messages, and gives: by reader, the own rows of each message to
    it, in the order in which the reader has them in `places`.
    """

    world: World
    rows: int
    places: Mapping[int, Sequence[RowSelection]]
    gives: Mapping[int, Sequence[RowSelection]]
    parts: int = 1
    _keys: Exchange | None = field(init=False)
    _gradients: Exchange | None = field(init=False)
    # By reader, the own rows of all its messages, which follow each other.
    _returned: Mapping[int, RowSelection] = field(init=False)

    def __post_init__(self) -> None:
        """Find out once what every call needs."""
        keys, gradients, returned = None, None, {}
        given = [*self.gives.values()]
        if all(selection.index is None for several in given for selection in several) and all(map(_follow, given)):
            returned = {reader: RowSelection(rows[0].first, rows[-1].stop) for reader, rows in self.gives.items()}
            places = {
                owner: [(selection.first, selection.stop) for selection in several]
                for owner, several in self.places.items()
            }
            gives = {reader: [(own.first, own.stop) for own in several] for reader, several in self.gives.items()}
            # K, V, and both gathered; the same of gradients, and what each reader returns.
            keys = Exchange(self.world, "keys", _of_pairs(gives), _of_both(places, (2,) * len(places)))
            arriving = {reader: [(a - rows[0][0], b - rows[0][0]) for a, b in rows] for reader, rows in gives.items()}
            gradients = Exchange(
                self.world, "gradients", _of_pairs(places), _of_both(arriving, range(2, 2 + len(arriving)))
            )
        for name, value in (("_keys", keys), ("_gradients", gradients), ("_returned", returned)):
            object.__setattr__(self, name, value)

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Work]:
        """Gathered K and V, and the work to wait for before they are read."""
        B, _, K, D = k.shape
        both = k.new_empty(2, B, self.rows, K // self.parts, D)
        keys, values = both.unbind()
        if self._keys is not None:
            return keys, values, self._keys.start(k, v, both)
        sends, receives = _messages(self.gives, k, v), _messages(self.places, keys, values)
        return keys, values, self.world.send_recv(sends, receives, "keys")

    def give_back(self, dkeys: Tensor, dvalues: Tensor, k: Tensor) -> Returned:
        """Send dK and dV of gathered rows to their owners, and receive those that readers have made of own rows."""
        if self._gradients is not None:
            pairs = [k.new_empty(2, *selection.shape(k)) for selection in self._returned.values()]
            work = self._gradients.start(dkeys, dvalues, *pairs)
            return Returned(work, [*zip(self._returned.values(), (pair.unbind() for pair in pairs), strict=True)])
        returned = {
            reader: [(selection, _empty_pair(selection, k, k.dtype)) for selection in several]
            for reader, several in self.gives.items()
        }
        receives = {reader: [x for _, pair in several for x in pair] for reader, several in returned.items()}
        work = self.world.send_recv(_messages(self.places, dkeys, dvalues), receives, "gradients")
        return Returned(work, [parts for several in returned.values() for parts in several])


def _follow(selections: Sequence[RowSelection]) -> bool:
    """Return True if there are some, and each begins where the one before ends."""
    return bool(selections) and all(before.stop == after.first for before, after in pairwise(selections))


def _of_pairs(ranges: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, list[RowsOf]]:
    """Ranges of the rows of two tensors."""
    return {peer: [(number, *span) for span in spans for number in range(2)] for peer, spans in ranges.items()}


def _of_both(ranges: Mapping[int, Sequence[tuple[int, int]]], numbers: Sequence[int]) -> dict[int, list[RowsOf]]:
    """Ranges of the rows of tensors of these numbers, one for each peer."""
    return {
        peer: [(number, *span) for span in spans] for number, (peer, spans) in zip(numbers, ranges.items(), strict=True)
    }


def places_in_order(needs: Mapping[int, int]) -> dict[int, list[RowSelection]]:
    """`RowGather.places` if each owner sends the same number of rows in one message, in the order of owners."""
    places, first = {}, 0
    for owner, rows in needs.items():
        if rows:
            places[owner] = [RowSelection(first, first + rows)]
        first += rows
    return places


def _messages(selections: Mapping[int, Sequence[RowSelection]], *tensors: Tensor) -> dict[int, list[Tensor]]:
    """The selected rows of tensors [B, N, ·, D], by peer."""
    return {peer: [selection.pack(x) for selection in several for x in tensors] for peer, several in selections.items()}
