"""Implementations and backends as call signatures (torch).

An implementation module has `build(workload, context) -> AttentionFn`. Building is set-up and never timed; the returned
call is. A backend module has `attend` and, if possible, `attend_backward`. Implementations reach backends only through
the context, so that any implementation runs over any backend.
"""

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from dilabench.metadata import (
    PATTERN_CACHE_BYTES,
    PATTERN_CACHE_ENTRIES,
    PATTERN_CACHE_HITS,
    PATTERN_CACHE_MISSES,
    Note,
)
from dilabench.workload.spec import UNBOUNDED, Window, Workload

if TYPE_CHECKING:
    from dilabench.distributed.world import World

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, N, H, D], k [B, N, K, D], v [B, N, K, Dv] -> out [B, N, H, Dv]; packed: [T, H, Dv].

Differentiable, unless the implementation says that it only does forward.
"""


@runtime_checkable
class WithLse(Protocol):
    """An AttentionFn that can also return lse [B, H, N] (natural log, fp32 or fp64); `verify` then checks it."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class WithNotes(Protocol):
    """An AttentionFn that has something to say about how it was built; its row carries the notes."""

    notes: tuple[Note, ...]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Attend(Protocol):
    """Dense attention forward, outside autograd.

    q [B, M, H, D]; k, v [B, L, K, D] with H a multiple of K, M == L when causal or windowed. A backend that aligns ends
    also takes a causal mask or a window over M < L: query i is at the position of key i + L - M. Any outer strides,
    last dim contiguous. Returns out [B, M, H, D] in q's dtype and lse [B, H, M] in float32 (float64 for float64). A row
    that sees no key has out 0 and lse -inf.

    A backend that says so (`Capabilities`) also takes v [B, L, K, Dv], for out [B, M, H, Dv], and a further option
    `softcap`, a number c: scores s become c·tanh(s/c), after the scale and before masks.

    It may have an attribute `differentiable`, a function of the same arguments that is called inside autograd: results
    that torch itself differentiates, lse without a gradient, or None for tensors of which it cannot.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Window = UNBOUNDED, scale: float
    ) -> tuple[Tensor, Tensor]: ...


class AttendBackward(Protocol):
    """Exact backward of dense attention from a *given* out and lse, which may come from a larger softmax.

    With the global out and lse of a union of key sets this gives this set's share of dq, dk, dv (semantics.md §1).
    Shapes and options as in `Attend`; lse [B, H, M]. Returns dq, dk, dv in the shapes and dtype of q, k, v.
    """

    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Merge(Protocol):
    """As `Attend`, but the results are merged into `out` and `lse`, which hold the results of other keys, in place.

    Both have any outer strides, and no two numbers of theirs are at one place. lse is [S, G, H, M] where S times G are
    the batch: its two axes need not be one. `fresh`: they hold nothing yet. `count`: each key counts as often.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
        fresh: bool,
        count: int,
    ) -> None: ...


class AddGradients(Protocol):
    """As `AttendBackward`, but gradients are added to `dq`, `dk` and `dv` in place; lse is as for `Merge`."""

    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
        count: int,
    ) -> None: ...


class MergingKernel(NamedTuple):
    """The kernel of a backend that merges results with the results of other keys. `dtypes`: of the inputs; `results`:
    of existing results and gradients, without lse.
    """

    merge: Merge
    add_gradients: AddGradients
    dtypes: frozenset[torch.dtype]
    results: torch.dtype


class AttendPacked(Protocol):
    """As `Attend`, within each of several sequences that follow each other along one axis.

    q [T, H, D]; k, v [T, K, D]. `cu_seqlens` int32 [S + 1] on their device: the start of each sequence, and T at the
    end. No sequence is empty, and `longest` is the length of the longest. Returns out [T, H, D] and lse [H, T].

    If keys and values [T_k, K, D] have other sequences, `cu_seqlens_k` and `longest_k` describe them. Under a causal
    mask or a window, the last query of a sequence then has the position of its last key, and each sequence has at least
    as many keys as queries. Raises ValueError then if the kernel does not align ends (`PackedKernel.aligns_ends`).
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens: Tensor,
        longest: int,
        cu_seqlens_k: Tensor | None = None,
        longest_k: int | None = None,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...


class AttendPackedBackward(Protocol):
    """As `AttendBackward`, of the sequences of `AttendPacked`; dk and dv have the shape of k and v."""

    def __call__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        cu_seqlens: Tensor,
        longest: int,
        cu_seqlens_k: Tensor | None = None,
        longest_k: int | None = None,
        causal: bool,
        window: Window = UNBOUNDED,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class PackedKernel(NamedTuple):
    """The kernel of a backend for packed sequences, all in one launch, and its kinds of device.

    aligns_ends: under a mask it takes sequences of fewer queries than keys, the last query at the position of the last
    key.
    """

    attend: AttendPacked
    attend_backward: AttendPackedBackward
    devices: frozenset[str] = frozenset({"cuda"})
    aligns_ends: bool = False


@dataclass(frozen=True, slots=True)
class LoadedBackend:
    """A backend ready to be called. `attend_backward` is None if the library has no such entry.

    packed: its kernel for packed sequences, if it has one. Without it dilabench's own tiles compute them on CUDA with
    Triton; elsewhere sequences are called one by one, because a CPU has no launches to save.

    aligns_ends: under a causal mask or a window it takes fewer queries than keys, the last query at the position of the
    last key.
    places_results: `attend` also takes `out`, and `attend_backward` takes `dq`, with the shape of q, the last dim
    contiguous and any outer strides: where to write the results, which it also returns. merging: its kernel that merges
    results and adds gradients in place, if it has one.
    """

    name: str
    attend: Attend
    attend_backward: AttendBackward | None = None
    aligns_ends: bool = False
    places_results: bool = False
    packed: PackedKernel | None = None
    merging: MergingKernel | None = None

    def require_backward(self) -> AttendBackward:
        """The backward pass; raises ValueError for a backend that has none."""
        if self.attend_backward is None:
            raise ValueError(f"backend {self.name} has no backward pass; use mode=forward or another backend")
        return self.attend_backward


class Packings(Protocol):
    """Computations (`impls.one_operator.Computation`) of packed sequences of one configuration, as many tokens and
    similar lengths.
    """

    def of(self, bounds: tuple[int, ...] | Tensor, tokens: int = 0, longest: int = 0) -> Any:
        """The computation for sequences from ``bounds[i]`` to ``bounds[i + 1]``, none of them empty.

        bounds: or int32 [n] on the device, not to be read. Then some may be empty, and both others are given: the
        number of all tokens, and of the longest sequence's, or more.
        """
        ...


class PatternCache:
    """Index tensors and tables that are expensive to build, kept on their device, bounded by a number of entries.

    Size zero: every `get` builds. The counters are part of the measurement. Safe to use from several threads: entries
    are built outside the lock, so building one pattern may request another. If two threads miss the same entry, both
    build it and the first to finish stores it.
    """

    def __init__(self, max_entries: int = 64) -> None:
        self.max_entries = max_entries
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._entries: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry of `key`, made when it is not there; the entry unused for longest leaves when the cache is full."""
        with self._lock:
            if key in self._entries:
                self.hits += 1
                self._entries[key] = self._entries.pop(key)
                return self._entries[key]
            self.misses += 1
        value = make()
        if self.max_entries < 1:
            return value
        with self._lock:
            value = self._entries.setdefault(key, value)
            while len(self._entries) > self.max_entries:
                self._entries.pop(next(iter(self._entries)))
        return value

    def clear(self) -> None:
        """Forget every entry, as after a reset of their device."""
        with self._lock:
            self._entries.clear()

    def counters(self) -> dict[str, int]:
        """Hits, misses, entries held and the bytes of their tensors."""
        with self._lock:
            entries = list(self._entries.values())
            return {
                PATTERN_CACHE_HITS.key: self.hits,
                PATTERN_CACHE_MISSES.key: self.misses,
                PATTERN_CACHE_ENTRIES.key: len(entries),
                PATTERN_CACHE_BYTES.key: sum(storage.nbytes() for storage in _storages(entries).values()),
            }


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    """Every storage that a pattern holds, by address: in tensors, in containers, in fields of dataclasses."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage}
    if isinstance(value, dict):
        value = list(value.values())
    elif is_dataclass(value):
        value = [getattr(value, field_.name) for field_ in fields(value)]
    found: dict[int, torch.UntypedStorage] = {}
    if isinstance(value, list | tuple):
        for part in value:
            found |= _storages(part)
    return found


class BufferPool(Protocol):
    """Workspace that lives only inside a call: never returned to the caller nor saved for backward."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor; give it back with `give`."""
        ...

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; the caller must not touch it again."""
        ...

    def clear(self) -> None:
        """Forget every buffer, as after a reset of their device."""
        ...

    def counters(self) -> dict[str, int]:
        """Requests, reuses, peak and held bytes."""
        ...


class NoPool:
    """The pool of size zero: every buffer is a plain allocation."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor from torch's own allocator."""
        return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        """Do nothing: the allocator frees the buffer with its last reference."""

    def clear(self) -> None:
        """Do nothing: no buffer is kept."""

    def counters(self) -> dict[str, int]:
        """No counters, because nothing is pooled."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The context of `build`: device, backend, ranks, pattern cache and buffer pool.

    `tiles`: tile shapes for its kernels, as text; empty for its defaults.
    """

    device: torch.device
    backend: LoadedBackend | None = None
    world: "World | None" = None
    patterns: PatternCache = field(default_factory=PatternCache)
    buffers: BufferPool = field(default_factory=NoPool)
    tiles: str = ""

    def require_backend(self) -> LoadedBackend:
        """The backend; raises ValueError for an implementation that needs one and was given none."""
        if self.backend is None:
            raise ValueError("this implementation calls a backend but the build context has none; pass one with -b")
        return self.backend


class Build(Protocol):
    """The entry of an implementation module."""

    def __call__(self, workload: Workload, context: BuildContext) -> AttentionFn: ...
