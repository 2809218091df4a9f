"""The one way into attention, for every pattern and device.

A public function makes a pattern and calls `attend`: operands are checked, the computation of the call is looked up and
run. Eager calls run by one autograd function, all others (compilers, traces, function transforms) as one operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from operator import sub
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dilabench.attention import operands
from dilabench.attention.operands import Kinds
from dilabench.attention.sequences import KeyLengths, key_bounds, kinds_of, numbers_of, spans_of
from dilabench.choice.computation import automatic, backend_of, check_backend, over, over_backends
from dilabench.choice.measured import doublings_of_mean
from dilabench.choice.ways import Way
from dilabench.contracts import Attend, Packings
from dilabench.errors import ConfigError
from dilabench.impls.call import AnyPattern, Call, Computation, OwnBackend, fields_of, name_of_function
from dilabench.impls.last_rows import BySequence, Run
from dilabench.impls.no_pairs import NOTHING_SEEN, SHAPES_ONLY, FirstRows
from dilabench.impls.one_operator import (
    ON_ONE_DEVICE,
    as_one_operator,
    eager,
    is_plain_eager_call,
    register,
)
from dilabench.impls.operator_rules import outside_compilers, refuse_forward_mode
from dilabench.kernels.streams import is_captured
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.workload.spec import AUTO, UNBOUNDED, Window, Workload, attended_pairs


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: AnyPattern = DENSE,
    *,
    causal: bool = False,
    window: Window = UNBOUNDED,
    scale: float | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    max_seqlen: int | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    key_lengths: KeyLengths | None = None,
    indices: Tensor | None = None,
    backend: str | Attend = AUTO,
    softcap: float | None = None,
    only_out: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [B, M, H, Dv] and lse [B, H, M] of query [B, M, H, D], key [B, N, K, D] and value [B, N, K, Dv]; packed
    [T, ·, ·] and [H, T]. Both are differentiable.

    Options as of `attention.attention`. only_out: no loss depends on lse, which may then carry no gradient. Raises
    ValueError for what does not fit together.
    """
    tensors, packed = (query, key, value), cu_seqlens is not None
    is_plain = is_plain_eager_call(query, key, value, indices)
    if not is_plain:
        operands.check_are_tensors(query=query, key=key, value=value)
    if type(causal) is not bool:
        operands.check_options({"causal": causal})
        causal = bool(causal)
    if torch._C._is_any_autocast_enabled():
        query, key, value = operands.as_autocast(query, key, value)
    bounds: tuple[int, ...] = ()
    longest, unread = 0, None
    ends: tuple[int, ...] = ()
    unread_ends = None
    if packed or max_seqlen is not None:
        bounds, longest, unread = operands.packing(query, key, value, cu_seqlens, max_seqlen, cu_seqlens_k)
        query, key, value = query[None], key[None], value[None]
    if cu_seqlens_k is not None or key_lengths is not None:
        ends, unread_ends = key_bounds(key, packed, cu_seqlens_k, key_lengths, spans=indices is None)
    if sink is not None:
        operands.check_is_tensor(sink)
    given = pattern
    if indices is not None:
        # Few calls select blocks.
        from dilabench.attention.given_blocks import selecting

        given, blocks = selecting(pattern, indices, query, key, (bounds, ends), (unread, unread_ends))
    else:
        blocks = None
    if forward_ad._current_level >= 0:
        refuse_forward_mode(query, key, value, *(() if sink is None else (sink,)))
    wants_gradient = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (sink is not None and sink.requires_grad)
        # A tensor inside of vmap says nothing of the one that it is a part of.
        or torch._C._are_functorch_transforms_active()
    )
    if not (is_plain or torch.compiler.is_compiling()) and torch._C._is_tracing():
        # The trace may later run with gradients.
        wants_gradient = True
    sides = window if type(window) is tuple else operands.integers("window", window)
    own: str | OwnBackend | Attend = backend
    if not isinstance(backend, str):
        operands.check_options({"backend": backend})
        own = name_of_function(backend) if torch.compiler.is_compiling() else OwnBackend(backend)
    if is_plain:
        call = Call(given, causal, sides, scale, bounds, longest, wants_gradient, own, "", ends, softcap)  # type: ignore[arg-type]
        computation = FINDER._computation_for(query, key, value, call, blocks, unread, unread_ends)
        if sink is not None:
            operands.check_sink(sink, query, call.pattern)
        elif not wants_gradient:
            out, lse, *_ = computation.forward(query, key, value)
            return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)
        out, lse = eager(computation, query, key, value, sink, blocks, unread, only_out=only_out)
        return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)
    fields = fields_of(given) if isinstance(given, Pattern) else given
    if fields is None:
        # A compiler cannot trace the pattern: the graph breaks here.
        options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "sink": sink}
        options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, "cu_seqlens_k": cu_seqlens_k}
        options |= {"key_lengths": key_lengths, "indices": indices, "backend": backend, "softcap": softcap}
        return outside_compilers(partial(attend, **options), *tensors, pattern)
    call = Call(DENSE, causal, sides, scale, bounds, longest, wants_gradient, own, "", ends, softcap)  # type: ignore[arg-type]
    operands.refuse_types(call._asdict())
    if sink is not None:
        operands.check_sink(sink, query, given if isinstance(given, Pattern) else None)
    read = sink, blocks, unread, unread_ends
    out, lse = as_one_operator(ON_ONE_DEVICE, query, key, value, call, fields, *read)  # type: ignore[arg-type]
    return (out.squeeze(0), lse.squeeze(0)) if packed else (out, lse)


def as_constant(lse: Tensor, pattern: AnyPattern | None) -> Tensor:
    """lse without its gradient if the merge of branches is detached, as operators give it to compilers."""
    if torch.compiler.is_compiling() or not isinstance(pattern, Pattern):
        return lse
    return lse.detach() if pattern.is_detached else lse


class _Finder:
    """Computations on one device, made once for each call and shape (`one_operator.CallFinder`)."""

    def _computation_for(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        indices: Tensor | None = None,
        bounds: Tensor | None = None,
        key_bounds: Tensor | None = None,
    ) -> Computation:
        kinds = (q.shape, q.dtype, q.device), (k.shape, k.dtype, k.device), (v.shape, v.dtype, v.device)
        try:
            if key_bounds is not None:
                unread = None if indices is not None else _of_unread_keys(kinds, call, bounds, key_bounds)
                if unread is not None:
                    return unread
                packed = bounds is not None or bool(call.cu_seqlens)
                call = call._replace(key_bounds=numbers_of(key_bounds, k.shape[1] if packed else k.shape[0], packed))
            if bounds is not None and call.key_bounds:
                call, bounds = _with_bounds(call, bounds, q.shape[1]), None
            if indices is not None:
                if bounds is not None:
                    call = _with_bounds(call, bounds, q.shape[1])
                from dilabench.attention.given_blocks import of_indices

                return of_indices(kinds, call, indices)
            if bounds is not None:
                return _of_bounds(kinds, call, bounds)
            return (_of_packing if call.cu_seqlens or call.key_bounds else _of_shapes)(kinds, call)
        except TypeError:
            operands.refuse_types(call._asdict())
            raise

    def _pairs_for(self, q: torch.Size, k: torch.Size, call: Call, indices: torch.Size | None) -> int:
        """The number of pairs is the same for every dtype and device."""
        of_query, of_key = ((shape, torch.float32, torch.device("cpu")) for shape in (q, k))
        if call.key_bounds:
            alone = call.of_one_sequence
            runs = (
                kinds_of((of_query, of_key, of_key), *spans) for spans in spans_of((of_query, of_key, of_key), call)
            )
            return sum(self._pairs_for(run[0][0], run[1][0], alone, indices) for run in runs)
        if indices is not None:
            call = call._replace(pattern=call.pattern.model_copy(update={"top_k": indices[-1]}))
        workload = operands.workload_of((of_query, of_key, of_key), call)
        # More queries than keys all see all.
        return attended_pairs(workload) * max(q[1], k[1]) // k[1] if workload else 0


FINDER = _Finder()
register(ON_ONE_DEVICE, FINDER)


def _made(kinds: Kinds, call: Call) -> Computation:
    """The computation for query, key and value of these kinds. Raises ValueError for what does not fit together."""
    if call.cu_seqlens and call.backend == AUTO and not call.key_bounds:
        of_documents = _of_documents(kinds, call)
        if of_documents is not None:
            return of_documents
    operands.check_call(call)
    (shape, _, device), *_ = kinds
    if not call.wants_gradient:
        # The outputs are the same, and more kernels support it.
        call = call._replace(pattern=call.pattern.merged_exactly)
    if call.pattern.compresses is not None:
        from dilabench.attention.given_blocks import over_compressed

        return over_compressed(kinds, call, call.pattern.compresses)
    operands.refuse_stand_ins(call.pattern)
    if call.key_bounds:
        alone, runs = call.of_one_sequence, [*spans_of(kinds, call)]
        if len(runs) > 1:
            bounds = torch.tensor(call.cu_seqlens, device=device) if call.cu_seqlens else None
            of_keys = torch.tensor(call.key_bounds, device=device)
            if bounds is None and len(of_keys) == 2 * shape[0]:
                of_keys = of_keys.view(-1, 2)
            together = _of_unread_keys(kinds, alone, bounds, of_keys)
            if together is not None:
                return together
        return BySequence([Run(*spans, _of_shapes(kinds_of(kinds, *spans), alone)) for spans in runs])
    try:
        workload = operands.workload_of(kinds, call)
        check_backend(call.backend)
        if device.type == "meta":
            return SHAPES_ONLY
        if workload is None:
            return NOTHING_SEEN
        if call.cu_seqlens and workload.seq_len < shape[1]:
            # The rows of the sequences are computed, and zeros follow them.
            return FirstRows(workload.seq_len, _made(_of_length(kinds, workload.seq_len), _of_workload(call, workload)))
        if call.backend == AUTO:
            return automatic(workload, device)[1]
        # A named backend may support only the forward pass.
        way = Way(over_backends(workload, device), None, workload.replace(mode="forward"))
        backend = backend_of(call.backend, way, device)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return over(backend, way.implementation, workload, device)


# For packed sequences, whose lists grow with the tokens: only the latest few stay.
_of_shapes, _of_packing = lru_cache(maxsize=64)(_made), lru_cache(maxsize=8)(_made)


def _of_length(kinds: Kinds, length: int) -> Kinds:
    query, key, value = ((torch.Size((1, length, *shape[2:])), *kind) for shape, *kind in kinds)
    return query, key, value  # type: ignore[return-value]


def _of_workload(call: Call, workload: Workload) -> Call:
    return call._replace(cu_seqlens=workload.cu_seqlens or ())


def _of_documents(kinds: Kinds, call: Call) -> Computation | None:
    """The computation of packed sequences that the fastest implementation derives from bounds alone, or None."""
    tokens = kinds[0][0][1]
    bounds = operands.without_empty(call.cu_seqlens, tokens)
    if len(bounds) < 3 or bounds[-1] < tokens:
        return None
    packings = _packings_like(kinds, call, len(bounds) - 1, max(map(sub, bounds[1:], bounds)))
    return None if packings is None else packings.of(bounds)


def _with_bounds(call: Call, bounds: Tensor, tokens: int) -> Call:
    """The call with bounds that are read."""
    return call._replace(cu_seqlens=operands.bounds(bounds, tokens), max_seqlen=0)


def _of_bounds(kinds: Kinds, call: Call, bounds: Tensor) -> Computation:
    """The computation of packed sequences with these bounds, which are read if their numbers are needed."""
    tokens = kinds[0][0][1]
    if call.max_seqlen and call.backend == AUTO and operands.may_stay(bounds) and len(bounds) > 1:
        longest = min(call.max_seqlen, tokens)
        packings = _packings_like(kinds, call, len(bounds) - 1, longest)
        if packings is not None:

            def made() -> Computation:
                # Another object, so that the result does not hold the tensor that it is kept for.
                there = bounds.detach().to(torch.int32).contiguous()
                return packings.of(there, tokens, longest)

            is_copied = bounds.dtype != torch.int32 or not bounds.is_contiguous()
            if is_copied and is_captured(bounds):
                # A graph copies them at each replay.
                return made()
            return _by_bounds.get(bounds, (packings, longest), made)
    return _of_packing(kinds, _with_bounds(call, bounds, tokens))


_by_bounds = operands.OfTensors[Computation]()


def _of_unread_keys(kinds: Kinds, call: Call, bounds: Tensor | None, key_bounds: Tensor) -> Computation | None:
    """The computation of sequences with fewer queries than keys, all numbers on the device, if the fastest
    implementation reads them there, else None.
    """
    query, _, device = kinds[0]
    stay = operands.may_stay(key_bounds) and key_bounds.device == device
    if call.cu_seqlens or not stay or key_bounds.shape[1:] not in ((), (2,)) or not key_bounds.shape[0]:
        return None
    if bounds is not None:
        # As if all were of one length.
        sequences = len(bounds) - 1
        if sequences < 1 or key_bounds.shape != bounds.shape or not operands.may_stay(bounds):
            return None
        alone = [(torch.Size((sequences, -(-x[1] // sequences), *x[2:])), *kind) for x, *kind in kinds]
        kinds, call = tuple(alone), call.of_one_sequence  # type: ignore[assignment]
    elif key_bounds.shape[0] != query[0]:
        return None
    try:
        alike = _of_shapes(kinds, call)
    except ValueError:
        # These are refused for equal lengths, not for the caller's.
        return None
    if bounds is None:
        of_lengths = getattr(alike, "of_lengths", None)
        return None if of_lengths is None else of_lengths(key_bounds)
    of_bounds = getattr(alike, "of_bounds", None)
    return None if of_bounds is None else of_bounds(bounds, key_bounds)


def _packings_like(kinds: Kinds, call: Call, sequences: int, longest: int) -> Packings | None:
    """`_packings` for this number of sequences, the longest of this many tokens or fewer."""
    (_, tokens, heads, _), (_, _, kv_heads, _) = kinds[0][0], kinds[1][0]
    # Only these are computed from bounds alone.
    if call.pattern.strided_segments(SequenceShape(tokens, heads, kv_heads, call.causal, call.window), 0) is None:
        return None
    rounded = min([1 << (longest - 1).bit_length(), *(w for w in call.pattern.segment_sizes if w >= longest)])
    shared = call._replace(cu_seqlens=(), max_seqlen=0)
    return _packings(kinds, shared, min(rounded, tokens - 1), doublings_of_mean(tokens, sequences))


@lru_cache(maxsize=64)
def _packings(kinds: Kinds, call: Call, longest: int, doublings: int) -> Packings | None:
    """The shared part of computations for packings of similar mean length with the longest of `longest` tokens, of the
    implementation that is fastest for one of them.
    """
    tokens = kinds[0][0][1]
    other_sequences = min(max(1, round(tokens / 2**doublings) - 1), tokens - longest)
    bounds = (0, *(longest + (tokens - longest) * at // other_sequences for at in range(other_sequences + 1)))
    operands.check_call(call)
    if not call.wants_gradient:
        call = call._replace(pattern=call.pattern.merged_exactly)
    try:
        workload = operands.workload_of(kinds, call._replace(cu_seqlens=bounds))
        if workload is None or kinds[0][2].type == "meta":
            return None
        return getattr(automatic(workload, kinds[0][2])[1], "packings", None)
    except (ConfigError, ValueError):
        # These are refused for the representative packing, not for the caller's.
        return None
