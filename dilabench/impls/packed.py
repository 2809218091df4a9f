"""Packed sequences: segments and zero keys restart in every one.

One launch computes all if rows see whole ranges of tokens: the backend's kernel for packed sequences or, on CUDA
without one, dilabench's tiles. Other strided branches take one or a few launches each over that kernel. Otherwise each
sequence uses the computation for its length; successive ones of equal length form a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dilabench.contracts import BuildContext, LoadedBackend, PackedKernel
from dilabench.impls.call import Computation
from dilabench.impls.null_mass import log_zero_keys
from dilabench.impls.one_operator import AttentionComputation
from dilabench.impls.union.branches import branches_of
from dilabench.impls.union.packed_rows import AllTokens, PackedRows, PackedUnion, packed_rows, varlen_arguments
from dilabench.kernels.lse import has_kernel
from dilabench.kernels.streams import record
from dilabench.metadata import OWN_TILES, Note
from dilabench.workload.spec import Workload

if TYPE_CHECKING:
    # Triton is not installed everywhere.
    from dilabench.impls import fused
    from dilabench.impls.fused import Fused, FusedDetached

# For dilabench's tiles.
LARGEST_HEAD_DIM, ROW_BYTES = 256, 16
# A CUDA grid's second and third axes end there, and kernels have sequences on one of them.
MOST_SEQUENCES = 65535


class _Run(NamedTuple):
    """A number of successive sequences of one length: a batch of them, without a copy."""

    start: int
    batch: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """[batch, length, ·, D] of x [1, T, ·, D]."""
        return x[0, self.start : self.start + self.batch * self.length].unflatten(0, (self.batch, self.length))

    def of_lse(self, lse: Tensor) -> Tensor:
        """[batch, H, length] of lse [1, H, T]."""
        own = lse[0, :, self.start : self.start + self.batch * self.length]
        return own.unflatten(1, (self.batch, self.length)).transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class Packed(AttentionComputation):
    """Sequences that follow each other along one axis, as runs of one length, with the computation of each run."""

    runs: tuple[tuple[_Run, Computation], ...]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for run, computation in self.runs:
            out, lse = computation.forward(run.of(q), run.of(k), run.of(v))[:2]
            outs.append(out.flatten(0, 1))
            lses.append(lse.transpose(0, 1).flatten(1))
        return _joined(outs, 0)[None], _joined(lses, 1)[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = []
        for run, computation in self.runs:
            own_dout, own_q, own_k, own_v, own_out = map(run.of, (dout, q, k, v, out))
            found = computation.backward(own_dout, own_q, own_k, own_v, own_out, run.of_lse(lse))
            gradients.append([x.flatten(0, 1) for x in found])
        dq, dk, dv = (_joined(several, 0)[None] for several in zip(*gradients, strict=True))
        return dq, dk, dv


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([*parts], dim) if len(parts) > 1 else parts[0]


def build_packed(
    padded: Callable[[Workload, BuildContext], Computation], workload: Workload, context: BuildContext
) -> Packed:
    """The computations that `padded` builds for each run of sequences of one length in a packed workload."""
    computations: dict[tuple[int, int], Computation] = {}
    runs = []
    for length, sequences in groupby(workload.sequences, lambda ends: ends[1] - ends[0]):
        (start, _), *others = sequences
        run = _Run(start, 1 + len(others), length)
        if run[1:] not in computations:
            alone = {"layout": "padded", "cu_seqlens": None, "batch_size": run.batch, "seq_len": length}
            computations[run[1:]] = padded(workload.replace(**alone), context)
        runs.append((run, computations[run[1:]]))
    return Packed(tuple(runs))


@dataclass(frozen=True, slots=True)
class OneLaunch(AttentionComputation):
    """All sequences in one launch by a backend's kernel for packed ones. arguments: sequences, mask and scale, as it
    takes them. packings: of other bounds, unless segments cut the sequences.
    """

    kernel: PackedKernel
    arguments: Mapping[str, Any] = field(compare=False)
    packings: WholeSequences | None = field(default=None, repr=False, compare=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        record(self.arguments.values())
        out, lse = self.kernel.attend(q[0], k[0], v[0], **self.arguments)
        return out[None], lse[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        record(self.arguments.values())
        tensors = (x[0] for x in (dout, q, k, v, out, lse))
        dq, dk, dv = self.kernel.attend_backward(*tensors, **self.arguments)
        return dq[None], dk[None], dv[None]


def in_one_launch(workload: Workload, context: BuildContext) -> OneLaunch | None:
    """A packed workload whose rows all see whole ranges of tokens, if the backend has a kernel for that."""
    kernel = context.require_backend().packed
    if kernel is None or context.device.type not in kernel.devices:
        return None
    bounds = _whole_stretches(workload, context.device)
    if bounds is None:
        return None
    packings = WholeSequences(kernel, workload, context.device) if tuple(bounds) == workload.cu_seqlens else None
    return OneLaunch(kernel, varlen_arguments(workload, 1, bounds, context.device), packings)


class WholeSequences:
    """`OneLaunch` for any bounds; the workload's do not matter."""

    def __init__(self, kernel: PackedKernel, workload: Workload, device: torch.device) -> None:
        self._kernel, self._workload, self._device = kernel, workload, device
        self._alike = varlen_arguments(workload, 1, [0], device)

    def of(self, bounds: tuple[int, ...] | Tensor, tokens: int = 0, longest: int = 0) -> OneLaunch:  # noqa: ARG002
        """As `contracts.Packings`."""
        if isinstance(bounds, Tensor):
            return OneLaunch(self._kernel, {**self._alike, "cu_seqlens": bounds, "longest": longest}, self)
        return OneLaunch(self._kernel, varlen_arguments(self._workload, 1, list(bounds), self._device), self)


def _whole_stretches(workload: Workload, device: torch.device) -> list[int] | None:
    """The bounds of the ranges of tokens that rows see; None if rows see other sets."""
    branch, *others = branches_of(workload)
    whole = not others and branch.rate == 1 and len(branch.places) == workload.num_heads
    if not whole or log_zero_keys(workload, device) is not None:
        return None
    segments = (range(start, stop, branch.segment_length) for start, stop in workload.sequences)
    return [*chain.from_iterable(segments), workload.seq_len]


@dataclass(frozen=True, slots=True)
class InTiles(AttentionComputation):
    """All sequences in one launch by dilabench's tiles, of rows that zeros fill up to `width` numbers. `notes`: that
    they replace the backend. packings: of other bounds.
    """

    tiles: Fused | FusedDetached
    width: int
    notes: tuple[Note, ...]
    packings: TilesOfSequences | None = field(default=None, repr=False, compare=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.tiles.forward(self._wider(q), self._wider(k), self._wider(v))[:2]
        return _narrower(out, v), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        own_dout, own_q, own_k, own_v, own_out = map(self._wider, (dout, q, k, v, out))
        dq, dk, dv = self.tiles.backward(own_dout, own_q, own_k, own_v, own_out, lse)
        return _narrower(dq, q), _narrower(dk, k), _narrower(dv, v)

    def _wider(self, x: Tensor) -> Tensor:
        return x if x.shape[-1] == self.width else torch.nn.functional.pad(x, (0, self.width - x.shape[-1]))


def _narrower(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]].contiguous()


def tiles_serve(workload: Workload, device: torch.device) -> bool:
    """Whether `in_tiles` computes a packed workload over a backend without a kernel for packed sequences."""
    return _bounds_of_tiles(workload, device) is not None


def _bounds_of_tiles(workload: Workload, device: torch.device) -> list[int] | None:
    if not has_kernel(device, getattr(torch, workload.dtype)) or _width(workload) > LARGEST_HEAD_DIM:
        return None
    return _whole_stretches(workload, device)


def _width(workload: Workload) -> int:
    """Numbers of a row that bulk copies can address and that keys and values fit into."""
    multiple = ROW_BYTES // getattr(torch, workload.dtype).itemsize
    return -(-max(workload.head_dim, workload.value_width) // multiple) * multiple


class TilesOfSequences:
    """`InTiles` for any bounds."""

    def __init__(self, tiles: fused.Packings, width: int, notes: tuple[Note, ...]) -> None:
        self._tiles, self._width, self._notes = tiles, width, notes

    def of(self, bounds: tuple[int, ...] | Tensor, tokens: int = 0, longest: int = 0) -> InTiles:
        """As `contracts.Packings`."""
        return InTiles(self._tiles.of(bounds, tokens, longest), self._width, self._notes, self)


def in_tiles(workload: Workload, context: BuildContext) -> InTiles | None:
    """The same by our own tiles, where the backend has no kernel for packed sequences and Triton runs."""
    backend = context.require_backend()
    bounds = None if backend.packed is not None else _bounds_of_tiles(workload, context.device)
    if bounds is None:
        return None
    message = f"{backend.name} has no kernel for packed sequences: dilabench's tiles compute them, all in one launch"
    note = OWN_TILES.note(message, hint="choose a backend that has one")
    # A row sees its whole range, as in a single branch of rate 1; many packings share the lists.
    from dilabench.impls.fused import Packings

    longest = max(stop - start for start, stop in pairwise(bounds))
    pattern = {"kind": "dilated", "segment_lengths": (1 << (longest - 1).bit_length(),), "dilation_rates": (1,)}
    width = _width(workload)
    wider = workload.replace(pattern=pattern, head_dim=width, value_dim=None, scale=workload.softmax_scale)
    packings = TilesOfSequences(Packings(wider, context), width, (note,))
    computation = packings.of(tuple(bounds))
    return computation if tuple(bounds) == workload.cu_seqlens else replace(computation, packings=None)


@dataclass(frozen=True, slots=True)
class ByBranches(AttentionComputation):
    """All sequences in one launch per branch."""

    union: PackedUnion

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = self.union.forward(q, k, v)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.union.backward(dout, q, k, v, out, lse)


def by_branches(workload: Workload, context: BuildContext) -> ByBranches | None:
    """A packed workload of strided branches in one launch for each, or few; None if there is no kernel for that."""
    backend = context.require_backend()
    kernel = backend.packed
    if kernel is None or context.device.type not in kernel.devices:
        return None

    def rows(device: torch.device) -> tuple[PackedRows | AllTokens, ...]:
        make = partial(packed_rows, workload, device, context.buffers)
        return context.patterns.get(("packed rows", workload, device), make)

    if any(len(call.arguments["cu_seqlens"]) > MOST_SEQUENCES for call in rows(context.device)):
        return None
    calls = partial(_as_batch, kernel.attend), partial(_as_batch, kernel.attend_backward)
    union = PackedUnion.of(workload, context, rows, backend=LoadedBackend(backend.name, *calls))
    return ByBranches(union)


def _as_batch(call: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, **options: Any) -> tuple[Any, ...]:
    """A call on tokens, of tensors with a batch axis of one."""
    return tuple(x[None] for x in call(*(x[0] for x in tensors), **options))
