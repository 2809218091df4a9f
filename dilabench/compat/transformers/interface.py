"""The attention and the masks that transformers' models call.

A mask function of transformers is known by the code of the functions that it consists of: causality, windows and
documents become a `Mask`. A function with others gives a tensor for every pair, which SDPA takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dilabench.attention import attention, operands
from dilabench.contracts import Attend
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import UNBOUNDED, Window

logger = logging.getLogger("dilabench.compat.transformers")

_SDPA = "torch's scaled_dot_product_attention"
# Attention that models already name, whose function every model with that name would lose.
_BEFORE = frozenset({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})


def add(name: str, pattern: Pattern | None, backend: str | Attend) -> None:
    """Add the attention and the masks of `register`. Raises ValueError as it does."""
    if not isinstance(name, str) or name in _BEFORE:
        raise ValueError(f"name {name!r} must be a text and none of transformers' own; give for example 'dilabench'")
    operands.check_pattern(pattern)
    if pattern is not None:
        # A call of a model has neither indices nor gates.
        operands.refuse_stand_ins(pattern)
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, pattern, backend))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)


@dataclass(frozen=True, eq=False, slots=True)
class Mask:
    """A mask of transformers by its parts. Models pass it from `_mask` to `_attend`.

    bounds: of documents among the B·N tokens, or among those that `tokens` names: the ones that are not padding.
    scattered: padding lies between tokens of a row, whose distances then count it. dense: bool [B, 1, N, N] or None, as
    SDPA takes it.
    """

    causal: bool
    window: Window
    bounds: tuple[int, ...] | None
    tokens: Tensor | None
    scattered: bool
    dense: Callable[[], Tensor | None]


@dataclass(frozen=True, eq=False, slots=True)
class TracedMask:
    """A mask in a graph that is being compiled, where the parts of its function cannot be told. `local_size`: of its
    window or chunks.
    """

    local_size: int | None
    dense: Callable[[], Tensor | None]


# The functions of masks that transformers builds others from, by their code.
_WHOLE = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
_CAUSAL = masking_utils.causal_mask_function.__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_BOTH_SIDES = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_DOCUMENTS = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__
_KNOWN = {
    *(_CAUSAL, _WINDOW, _BOTH_SIDES, _DOCUMENTS),
    masking_utils.bidirectional_mask_function.__code__,
    masking_utils.and_masks().__code__,
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, torch.empty(0)).__code__,
}


def _mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> Mask | TracedMask | Tensor | None:
    """As `sdpa_mask`: None if causality is all, a `Mask` if it consists of parts that `attention` computes, else bool
    [B, 1, N, M].
    """
    dense = partial(
        sdpa_mask,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **arguments,
    )
    offset = arguments.get("q_offset", 0)
    may_skip = arguments.get("allow_is_causal_skip", True) or arguments.get("allow_is_bidirectional_skip", False)
    if q_length != kv_length or isinstance(offset, Tensor) or offset:
        return dense()
    if torch.compiler.is_compiling():
        if attention_mask is not None or arguments.get("use_vmap", False):
            return dense()
        is_whole = may_skip and mask_function in _WHOLE
        return None if is_whole else TracedMask(arguments.get("local_size"), dense)
    parts = dict(_parts(mask_function))
    if torch._C._is_tracing() or not (parts.keys() <= _KNOWN and (may_skip or _DOCUMENTS in parts)):
        return dense()
    window = UNBOUNDED
    if _WINDOW in parts:
        window = parts[_WINDOW]["sliding_window"] - 1, -1
    elif _BOTH_SIDES in parts:
        window = (parts[_BOTH_SIDES]["sliding_window"],) * 2
    if window[0] >= kv_length - 1:
        window = UNBOUNDED
    bounds: tuple[int, ...] | None = None
    tokens, scattered = None, False
    if _DOCUMENTS in parts:
        bounds = _where_they_change(parts[_DOCUMENTS]["packed_sequence_mask"])
    if attention_mask is not None:
        seen = attention_mask[:, :kv_length].bool()
        begins = torch.cat([seen[:, :1], seen[:, 1:] & ~seen[:, :-1]], 1)
        lengths, stretches = torch.stack([seen.sum(1), begins.sum(1)]).tolist()
        if sum(lengths) < seen.numel():
            bounds, tokens = tuple(accumulate(lengths, initial=0)), seen.flatten().nonzero()[:, 0]
            scattered = max(stretches) > 1
    if bounds is None and window == UNBOUNDED:
        return None
    return Mask(_CAUSAL in parts, window, bounds, tokens, scattered, dense)


def _parts(function: Callable[..., Any]) -> Iterator[tuple[CodeType | None, dict[str, Any]]]:
    """The code of a mask function and of those that it calls, each with the variables that it encloses."""
    code = getattr(function, "__code__", None)
    cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    variables = dict(zip(code.co_freevars, cells, strict=True)) if code else {}
    yield code, variables
    for value in variables.values():
        for inner in value if isinstance(value, tuple) else (value,):
            if callable(inner):
                yield from _parts(inner)


def _where_they_change(documents: Tensor) -> tuple[int, ...]:
    """Bounds of documents in B·N tokens, by the number of each token's document [B, N], which rises in each row."""
    begins = documents.diff(dim=1, prepend=documents.new_full((len(documents), 1), -1))
    return (*begins.flatten().nonzero()[:, 0].tolist(), documents.numel())


def _attend(
    pattern: Pattern | None,
    backend: str | Attend,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | TracedMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """out [B, N, H, D] of query [B, H, N, D], key and value [B, K, M, D], as the interface of transformers asks."""
    if softcap is not None:
        raise ValueError(f"softcap {softcap} is not computed by dilabench; use attn_implementation='eager'")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if isinstance(attention_mask, TracedMask):
        # Bounds promise documents, as for the flash attention of transformers, and the module says the rest.
        trusted = cu_seq_lens_q is not None and attention_mask.local_size in (None, sliding_window)
        attention_mask = None if trusted else attention_mask.dense()
    mask = attention_mask if isinstance(attention_mask, Mask) else None
    if mask is None:
        window = UNBOUNDED
        if sliding_window is not None and sliding_window < key.shape[2]:
            window = (sliding_window - 1, -1) if causal else (sliding_window, sliding_window)
        given = cast("Tensor | None", attention_mask)
        mask = Mask(causal, window, None, None, False, lambda: given)
    packed = cu_seq_lens_q is not None
    reason = _why_not(query, key, attention_mask, mask, dropout, pattern, others)
    if reason is not None:
        if pattern is not None or s_aux is not None:
            what = "sinks" if pattern is None else f"pattern {pattern.kind}"
            raise ValueError(f"{reason}, with {what}: dilabench computes none, and {_SDPA} has no {what}")
        whole = mask.dense()
        if whole is None and (packed or mask.window != UNBOUNDED):
            what = "cu_seq_lens_q" if packed else f"sliding_window {sliding_window}"
            raise ValueError(f"{reason}, with {what}: dilabench computes none, and {_SDPA} ignores {what}")
        if not torch.compiler.is_compiling():
            _warn_once(f"{reason}: {_SDPA} computes such calls, not dilabench")
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **others}
        out, _ = sdpa_attention_forward(module, query, key, value, whole, **options)
        return out, None
    bounds: tuple[int, ...] | Tensor | None = mask.bounds
    if cu_seq_lens_q is not None:
        if mask.tokens is not None:
            raise ValueError("attention_mask has padding, and cu_seq_lens_q packs without; give one of the two")
        bounds = cu_seq_lens_q
        if not torch.compiler.is_compiling() and _may_differ(cu_seq_lens_q, cu_seq_lens_k, max_length_q):
            raise ValueError("cu_seq_lens_k differs from cu_seq_lens_q: documents attend to themselves; give the same")
    if (value_dim := value.shape[-1]) < key.shape[-1]:
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - value_dim))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = {"pattern": pattern, "causal": mask.causal, "window": mask.window, "scale": scaling, "backend": backend}
    if bounds is None:
        out = attention(q, k, v, sink=s_aux, **options)
    else:
        tokens = None if mask.tokens is None else mask.tokens.to(query.device)
        q, k, v = (x.flatten(0, 1) if tokens is None else x.flatten(0, 1).index_select(0, tokens) for x in (q, k, v))
        # A graph that is being compiled would serve this length alone.
        longest = max_length_q if not torch.compiler.is_compiling() and isinstance(max_length_q, int) else None
        out = attention(q, k, v, cu_seqlens=bounds, max_seqlen=longest, sink=s_aux, **options)
        if tokens is not None:
            out = out.new_zeros(query.shape[0] * query.shape[2], *out.shape[1:]).index_copy(0, tokens, out)
        out = out.unflatten(0, (query.shape[0], query.shape[2]))
    return out[..., :value_dim], None


def _why_not(
    query: Tensor,
    key: Tensor,
    given: object,
    mask: Mask,
    dropout: float,
    pattern: Pattern | None,
    others: dict[str, Any],
) -> str | None:
    """The part of a call that dilabench does not compute, or None."""
    if isinstance(given, Tensor):
        return "attention_mask is a tensor for every pair"
    if query.shape[2] != key.shape[2]:
        return "there are more keys than queries (a cache; use_cache=False has none)"
    if dropout:
        return f"dropout {dropout} of attention weights (config.attention_dropout)"
    if others.get("position_bias") is not None:
        return "position_bias is added to scores"
    if mask.scattered and (pattern is not None or mask.window != UNBOUNDED):
        return "attention_mask has padding between tokens of a row, which counts for distances"
    return None


def _may_differ(queries: Tensor, keys: Tensor | None, longest: int | None) -> bool:
    """Whether bounds differ. On a GPU only their number is compared if the longest length is given, with which
    attention reads no bounds either.
    """
    if keys is None or keys is queries:
        return False
    if keys.is_cuda and longest is not None:
        return keys.shape != queries.shape
    return operands.bounds(keys, 0) != operands.bounds(queries, 0)


@lru_cache(maxsize=256)
def _warn_once(message: str) -> None:
    logger.warning(message)
