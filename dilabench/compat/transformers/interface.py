"""The attention that transformers' models call: its keywords become a call of `attention`, or are refused by name."""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dilabench.attention import attention, operands
from dilabench.compat.transformers.by_pairs import by_sdpa
from dilabench.compat.transformers.masks import NOTE, Mask, Traced, mask
from dilabench.compat.transformers.selection import in_documents, selection_of, why_not_selected
from dilabench.contracts import Attend
from dilabench.patterns import SelectedBlocksPattern
from dilabench.patterns.pattern import Pattern
from dilabench.workload.spec import UNBOUNDED

logger = logging.getLogger("dilabench.compat.transformers")

STRICT_VARIABLE = "DILABENCH_STRICT"
_SDPA = "torch's scaled_dot_product_attention"
# Attention that models already name, whose function every model with that name would lose.
_BEFORE = frozenset({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
_added: list[str] = []

# Keywords of models that say nothing of what a query attends to: the mask or the tensors already hold it.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "logits_to_keep",
        "max_length_k",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def add(name: str, pattern: Pattern | None, backend: str | Attend) -> None:
    """Add the attention and the masks of `register`. Raises ValueError as it does."""
    if not isinstance(name, str) or name in _BEFORE:
        raise ValueError(f"name {name!r} must be a text and none of transformers' own; give for example 'dilabench'")
    operands.check_pattern(pattern)
    if pattern is not None:
        # A call of a model has no gates, and its indices are of its own pattern.
        operands.refuse_stand_ins(pattern)
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, pattern, backend))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    if not _added:
        PreTrainedModel.get_correct_attn_implementation = _listing(PreTrainedModel.get_correct_attn_implementation)
    if name not in _added:
        _added.append(name)


def _listing(checks: Any) -> Any:
    """The check of an `attn_implementation`, whose refusal of an unknown name lists the names of `register`, too."""

    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, *arguments: Any, **options: Any
    ) -> str:
        is_known = requested_attention is None or requested_attention in ALL_ATTENTION_FUNCTIONS.valid_keys()
        try:
            correct: str = checks(self, requested_attention, *arguments, **options)
        except ValueError as error:
            if is_known:
                raise
            raise ValueError(f"{error} dilabench added {', '.join(map(repr, _added))}.") from None
        return correct

    return get_correct_attn_implementation


def _attend(
    pattern: Pattern | None,
    backend: str | Attend,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """out [B, M, H, D] of query [B, H, M, D], key and value [B, K, N, D], as the interface of transformers asks.

    indices: [B, M, S], the keys that each query selects (DSA). block_indices: [B, K, M, S], the blocks of keys that it
    selects for each head of keys (MSA), -1 for none.
    """
    _refuse_unknown(module, keywords)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    note = getattr(attention_mask, NOTE, None)
    parts: Mask | None = None
    window = UNBOUNDED
    if isinstance(attention_mask, Mask):
        fits = (attention_mask.shape[0], *attention_mask.shape[2:]) == (query.shape[0], query.shape[2], key.shape[2])
        if fits and (torch.compiler.is_compiling() or not attention_mask.is_written):
            parts, causal, window = attention_mask, attention_mask.causal, attention_mask.window
            key, value = key[:, :, : parts.length], value[:, :, : parts.length]
        else:
            # It is spread over the batch or the queries, or was changed.
            attention_mask = attention_mask.dense()
    elif isinstance(note, Traced) and (
        note.is_causal is not None or (cu_seq_lens_q is not None and note.local_size in (None, sliding_window))
    ):
        # Bounds promise documents, as for the flash attention of transformers, and the module says the rest.
        causal = causal if note.is_causal is None else note.is_causal
        attention_mask = None
    if attention_mask is None and sliding_window is not None and sliding_window < key.shape[2]:
        window = (sliding_window - 1, -1) if causal else (sliding_window, sliding_window)
    selection = selection_of(module, query, key, indices, block_indices)
    reason = None
    if attention_mask is not None and parts is None:
        reason = _why_dense(attention_mask, note)
    elif dropout:
        reason = f"dropout {dropout} of attention weights; set config.attention_dropout=0"
    elif position_bias is not None:
        reason = "position_bias is added to scores"
    elif parts is not None:
        reason = _why_not_parts(parts, module, pattern, softcap)
    elif causal and query.shape[2] not in (1, key.shape[2]):
        reason = f"no mask says which of {key.shape[2]} keys the {query.shape[2]} queries are"
    if reason is None and selection is not None:
        reason = why_not_selected(selection, pattern, parts, cu_seq_lens_q)
    if reason is not None:
        asked = {
            "pattern": pattern and pattern.kind,
            "cu_seq_lens_q": None if cu_seq_lens_q is None else "given",
            "sliding_window": sliding_window if attention_mask is None and window != UNBOUNDED else None,
        }
        for what, given in asked.items():
            if given is not None:
                raise ValueError(
                    f"{_name(module)}: {reason}, with {what} {given}: {_SDPA}, which computes such calls, has no {what}"
                )
        by = _SDPA if softcap is None else "torch, by products of every pair,"
        _fall_back(module, f"{reason}: {by} computes such calls, not dilabench")
        whole = attention_mask
        if parts is not None:
            is_whole = parts.is_plain and (query.shape[2] in (1, key.shape[2]) or not causal)
            whole = None if is_whole else parts.visible()[..., : parts.length]
            position_bias = None if position_bias is None else position_bias[..., : parts.length]
        kept = {"dropout": dropout, "scaling": scaling, "is_causal": causal, "position_bias": position_bias}
        return by_sdpa(module, query, key, value, whole, selection, s_aux, softcap, kept), None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    value_dim, width = value.shape[-1], max(value.shape[-1], key.shape[-1])
    if pattern is not None or selection is not None:
        # Only dense attention takes values of another width than keys.
        query, key, value = (
            x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
            for x in (query, key, value)
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"pattern": pattern, "causal": causal, "window": window, "scale": scaling}
    options |= {"softcap": softcap, "sink": s_aux, "backend": backend}
    if selection is not None:
        indices, size = selection
        # The indices say which and how many.
        blocks = SelectedBlocksPattern(block_size=size, top_k=1, selector="random")
        options |= {"pattern": blocks, "indices": indices}
    if cu_seq_lens_q is not None:
        if parts is not None and parts.seen is not None:
            raise ValueError("attention_mask has padding, and cu_seq_lens_q packs without; give one of the two")
        if not torch.compiler.is_compiling() and _may_differ(cu_seq_lens_q, cu_seq_lens_k, max_length_q):
            raise ValueError("cu_seq_lens_k differs from cu_seq_lens_q: documents attend to themselves; give the same")
        # A graph that is being compiled would serve this length alone.
        longest = max_length_q if not torch.compiler.is_compiling() and isinstance(max_length_q, int) else None
        out = _of_documents(q, k, v, cu_seq_lens_q, None, options | {"max_seqlen": longest})
    elif parts is None or (parts.documents is None and parts.seen is None):
        out = attention(q, k, v, **options)
    elif _drops_rows(parts, module):
        assert parts.bounds is not None, "as many queries as keys"
        out = _of_documents(q, k, v, parts.bounds, parts.tokens, options)
    else:
        assert parts.spans is not None, "documents, and padding between keys, are refused"
        out = _of_spans(q, k, v, parts.spans.tolist(), options)
    return out[..., :value_dim], None


def _of_documents(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, tokens: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """out [B, N, H, D] of documents among the B·N tokens, or among those that `tokens` names; other rows are 0."""
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    if options.get("indices") is not None:
        options = options | {"indices": in_documents(options["indices"], bounds, tokens)}
    if tokens is None:
        return attention(*packed, cu_seqlens=bounds, **options).unflatten(0, q.shape[:2])
    tokens = tokens.to(q.device)
    out = attention(*(x.index_select(0, tokens) for x in packed), cu_seqlens=bounds, **options)
    return out.new_zeros(len(packed[0]), *out.shape[1:]).index_copy(0, tokens, out).unflatten(0, q.shape[:2])


def _of_spans(q: Tensor, k: Tensor, v: Tensor, spans: list[list[int]], options: dict[str, Any]) -> Tensor:
    """out [B, M, H, D] of rows that see the keys of a span; queries that are padding get 0.

    With such queries, and for indices, neighbours of equal spans are one call over views of their keys.
    """
    has_places = options["causal"] or options["pattern"] is not None
    shortest = min((end - first for first, end in spans), default=0)
    if options.get("indices") is None and (shortest >= q.shape[1] or not has_places):
        return attention(q, k, v, key_lengths=spans, **options)
    outs = []
    for (first, end), group in groupby(range(len(spans)), spans.__getitem__):
        items = [*group]
        batch = slice(items[0], items[-1] + 1)
        padding = max(0, q.shape[1] - (end - first)) if has_places else 0
        own = options
        if options.get("indices") is not None:
            indices = options["indices"][batch, padding:] - first
            own = options | {"indices": torch.where((indices >= 0) & (indices < end - first), indices, -1)}
        out = attention(q[batch, padding:], k[batch, first:end], v[batch, first:end], **own)
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, 0, padding, 0)) if padding else out)
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _why_not_parts(parts: Mask, module: torch.nn.Module, pattern: Pattern | None, softcap: float | None) -> str | None:
    """The part of a mask that dilabench does not compute, or None."""
    if parts.key_offset and pattern is not None:
        return f"the cache dropped {parts.key_offset} keys, from which the places of a pattern count"
    if parts.documents is None and parts.seen is None:
        return None
    if _drops_rows(parts, module):
        if parts.scattered and (pattern is not None or parts.window != UNBOUNDED):
            return "attention_mask has padding or other documents between the tokens of one, which count for distances"
        return None
    what = "padding" if parts.documents is None else "documents"
    reason = f"{what} of keys whose queries are fewer (a cache), or may be another sequence's"
    if torch.compiler.is_compiling():
        return f"{reason}, under torch.compile"
    if parts.spans is None:
        return reason if parts.documents is not None else f"padding between the tokens of a row: {reason}"
    first, end = parts.spans.unbind(1)
    if (parts.causal or pattern is not None) and ((end < parts.length) & (first < end)).any():
        return f"padding behind the last token of a row: {reason}"
    # One query of each item is a launch for all.
    alone = parts.shape[2] == 1 and softcap is None
    if pattern is None and not alone and parts.anchor.is_cuda and (parts.spans != parts.spans[:1]).any():
        return f"padding of unequal length, where each length is a launch: {reason}"
    return None


def _drops_rows(parts: Mask, module: torch.nn.Module) -> bool:
    """Whether queries and keys are the same tokens, so that padding is dropped of both."""
    if parts.shape[2] != parts.length:
        return False
    if parts.causal or parts.window != UNBOUNDED or parts.documents is not None:
        return True
    return not torch.compiler.is_compiling() and _reads_one_sequence(type(module))


# Parameters of modules whose queries and keys are of the same tokens.
_OF_ONE_SEQUENCE = frozenset(
    {
        "attention_mask",
        "cache",
        "cu_seqlens",
        "hidden_states",
        "kwargs",
        "max_seqlen",
        "output_attentions",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "self",
        "use_cache",
    }
)


def _reads_one_sequence(kind: type[torch.nn.Module]) -> bool:
    """Whether a module's queries and keys can only be of the same tokens: it takes no other states."""
    return inspect.signature(kind.forward).parameters.keys() <= _OF_ONE_SEQUENCE


def _refuse_unknown(module: torch.nn.Module, keywords: dict[str, Any]) -> None:
    """Refuse keywords of a model that change what attention computes, or that may."""
    # The values of harmless ones are not read: a compiled graph would serve these alone.
    for name in keywords.keys() - _HARMLESS:
        if keywords[name] is not None:
            raise ValueError(
                f"{_name(module)}: keyword {name} may change what attention computes, and dilabench does not know it; "
                "use attn_implementation='eager'"
            )


def _why_dense(given: Tensor, note: Traced | str | None) -> str:
    """Why a mask has to be taken pair by pair."""
    if isinstance(note, Traced):
        return (
            "torch.compile hides whether position_ids restart and what the mask consists of; give cu_seq_lens_q, or "
            "without windows and documents use_cache=True"
        )
    if note is not None:
        return note
    dtype = str(given.dtype).removeprefix("torch.")
    return f"attention_mask is a tensor, {dtype} {tuple(given.shape)}, with a value for every pair"


def _may_differ(queries: Tensor, keys: Tensor | None, longest: int | None) -> bool:
    """Whether bounds differ. On a GPU only their number is compared if the longest length is given, with which
    attention reads no bounds either.
    """
    if keys is None or keys is queries:
        return False
    if keys.is_cuda and longest is not None:
        return keys.shape != queries.shape
    return operands.bounds(keys, 0) != operands.bounds(queries, 0)


def _name(module: torch.nn.Module) -> str:
    model = getattr(getattr(module, "config", None), "model_type", None)
    return type(module).__name__ if model is None else f"{type(module).__name__} of {model}"


_said: set[tuple[int | str, str]] = set()


def _fall_back(module: torch.nn.Module, reason: str) -> None:
    """Say once for each model that torch computes a call. Raises ValueError if DILABENCH_STRICT is 1."""
    if torch.compiler.is_compiling():
        # No object of Python may pass from a graph to a logger.
        refused = _say(_name(module), _name(module), reason)
    else:
        config = getattr(module, "config", module)
        key = id(config), reason
        if key not in _said:
            weakref.finalize(config, _said.discard, key)
        refused = _say(id(config), _name(module), reason)
    if refused:
        raise ValueError(f"{_name(module)}: {reason}; {STRICT_VARIABLE}=1 makes this an error")


@torch._dynamo.assume_constant_result
def _say(model: int | str, name: str, reason: str) -> bool:
    """Warn once for a model and a reason. Return True if it is an error."""
    if os.environ.get(STRICT_VARIABLE) == "1":
        return True
    if (model, reason) not in _said:
        _said.add((model, reason))
        logger.warning("%s: %s", name, reason)
    return False
