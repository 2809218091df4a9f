"""Masks for transformers' models: tensors with the numbers of eager attention's that keep what they consist of.

A mask function of transformers is known by the code of the functions that it consists of. Causality, windows, documents
and padding become a `Mask`; a function with other parts gives a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import masking_utils
from transformers.masking_utils import eager_mask

from dilabench.attention.operands import may_stay
from dilabench.workload.spec import UNBOUNDED, Window

# The functions of masks that transformers builds others from, by their code.
_CAUSAL = masking_utils.causal_mask_function.__code__
_BIDIRECTIONAL = masking_utils.bidirectional_mask_function.__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_BOTH_SIDES = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_DOCUMENTS = masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__
_GROUPING = {
    masking_utils.and_masks().__code__,
    # Documents come with it, and inside of one the positions count as the tokens do.
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, torch.empty(0)).__code__,
}
_REPEATABLE = {_CAUSAL, _BIDIRECTIONAL}
_SINGLE = {_WINDOW, _BOTH_SIDES, _DOCUMENTS}

NOTE = "_dilabench_note"
"""Attribute of a plain mask: a `Traced`, or the reason why it is no `Mask`."""


class Mask(torch.Tensor):
    """[B, 1, M, N] as for eager attention, 0 if a query attends to a key and else the least number of its dtype. These
    numbers are made when an operator touches it.

    The queries are the last M rows of the first `length` keys, later keys are hidden, and `key_offset` keys before them
    were dropped. If not `causal`, without window and documents, the keys may belong to another sequence. documents:
    [B, length] numbers, equal ones attend to each other. seen: bool [B, length], False is padding.

    spans: int64 [B, 2] on the CPU, without documents: the first of the keys of a row that are no padding and the end of
    them, 0 and 0 if it has none; None if there is padding between them.

    If there are as many queries as keys: tokens, int64 [T], those of the B·length tokens that are not padding, document
    by document; None is all of them in order. bounds: int32 of documents among these tokens, on the CPU; None is one
    for each row. scattered: the tokens of a document have others between them.
    """

    causal: bool
    window: Window
    length: int
    key_offset: int
    scattered: bool
    documents: Tensor | None
    seen: Tensor | None
    spans: Tensor | None
    tokens: Tensor | None
    bounds: Tensor | None
    # Empty, of its dtype and on its device.
    anchor: Tensor
    # Its numbers, once they are made, and whether a model has views of them; or the mask whose last rows it is.
    whole: Tensor | None
    has_views: bool
    source: Mask | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _FACTS = ("causal", "window", "length", "key_offset", "scattered")
    _TENSORS = ("documents", "seen", "spans", "tokens", "bounds")
    _ON_CPU = ("spans", "bounds")

    @staticmethod
    def __new__(cls, size: Any, anchor: Tensor, facts: tuple[Any, ...], tensors: dict[str, Tensor]) -> Mask:
        mask: Mask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=anchor.dtype, device=anchor.device)
        return mask

    def __init__(self, _size: Any, anchor: Tensor, facts: tuple[Any, ...], tensors: dict[str, Tensor]) -> None:
        self.anchor, self.whole, self.has_views, self.source = anchor, None, False, None
        for name, fact in zip(self._FACTS, facts, strict=True):
            setattr(self, name, fact)
        for name in self._TENSORS:
            setattr(self, name, tensors.get(name))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        given = [name for name in self._TENSORS if getattr(self, name) is not None]
        return ["anchor", *given], tuple(getattr(self, name) for name in self._FACTS)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], facts: tuple[Any, ...], size: Any, _stride: Any) -> Mask:
        return Mask(size, inner["anchor"], facts, {name: x for name, x in inner.items() if name != "anchor"})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._with()
        if func is aten._to_copy.default and {*kwargs} <= {"device", "non_blocking"}:
            return args[0]._with(device=kwargs.get("device"))
        if func is aten.slice.Tensor and isinstance(args[0], Mask):
            rows = args[0]._last_rows(*args[1:])
            if rows is not None:
                return rows
        if func._schema.is_mutable and isinstance(args[0], Mask):
            raise RuntimeError(f"{func} writes to a whole mask of dilabench; write to mask.clone()")
        if func.is_view:
            (args[0] if args[0].source is None else args[0].source).has_views = True
        args, kwargs = tree_map_only(Mask, Mask.dense, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def is_written(self) -> bool:
        """Whether a model wrote to a view of `dense`, so that the facts no longer hold."""
        source = self if self.source is None else self.source
        return source.has_views and not torch.equal(source.dense(), source._made())

    @property
    def is_plain(self) -> bool:
        """Whether causality is all that hides keys."""
        return self.window == UNBOUNDED and self.documents is None and self.seen is None

    def dense(self) -> Tensor:
        """The mask as a plain tensor, made once."""
        if self.source is not None:
            return self.source.dense()[:, :, -self.shape[2] :]
        if self.whole is None:
            self.whole = self._made()
        return self.whole

    def _made(self) -> Tensor:
        least = torch.finfo(self.anchor.dtype).min
        return self.anchor.new_zeros(self.shape).masked_fill(~self.visible(), least)

    def visible(self) -> Tensor:
        """bool [B, 1, M, N], True if a query attends to a key."""
        batch, _, rows, keys = self.shape
        device = self.anchor.device
        key = torch.arange(keys, device=device)
        query = torch.arange(rows, device=device)[:, None] + (self.length - rows)
        visible = torch.ones(batch, 1, rows, keys, dtype=torch.bool, device=device)
        visible &= key <= query if self.causal else key < self.length
        left, right = self.window
        if left >= 0:
            visible &= key >= query - left
        if right >= 0:
            visible &= key <= query + right
        if self.documents is not None:
            numbers = torch.nn.functional.pad(self.documents, (0, keys - self.length))
            visible &= (numbers[:, self.length - rows : self.length, None] == numbers[:, None])[:, None]
        if self.seen is not None:
            visible &= torch.nn.functional.pad(self.seen, (0, keys - self.length))[:, None, None]
        return visible

    def _with(self, rows: int | None = None, device: Any = None) -> Mask:
        """The same mask, of its last rows, or on another device."""
        size = self.shape if rows is None else (*self.shape[:2], rows, self.shape[3])
        moved = {name: getattr(self, name) for name in self._TENSORS}
        if device is not None:
            moved = {name: x if x is None or name in self._ON_CPU else x.to(device) for name, x in moved.items()}
        anchor = self.anchor if device is None else self.anchor.to(device)
        facts = tuple(getattr(self, name) for name in self._FACTS)
        mask = Mask(size, anchor, facts, {name: x for name, x in moved.items() if x is not None})
        if device is None:
            mask.source = self if self.source is None else self.source
        return mask

    def _last_rows(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Mask | None:
        """The mask of its last rows, if that is what a slice selects; or all of it."""
        size, start = self.shape[dim], 0 if start is None else start
        first = max(size + start, 0) if start < 0 else start
        if step != 1 or (end is not None and end < size) or first > size:
            return None
        if first == 0:
            return self._with()
        return self._with(rows=size - first) if dim in (2, -2) and self.causal and first < size else None


class Traced:
    """A mask in a graph that is being compiled, where the parts of its function are hidden.

    `is_causal`: None if they are; else causality is all. `local_size`: of its window or chunks.
    """

    def __init__(self, is_causal: bool | None, local_size: int | None) -> None:
        self.is_causal, self.local_size = is_causal, local_size


def mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Tensor:
    """As `eager_mask`, which every model knows: a `Mask` if it consists of parts that `attention` computes.

    It is never None: a model may select rows of it, and None would hide that it was causal.
    """
    arguments["allow_is_bidirectional_skip"] = False
    dense = partial(
        eager_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        dtype=dtype,
        **arguments,
    )
    if q_length == 1 and (torch.compiler.is_compiling() or (isinstance(q_offset, Tensor) and may_stay(q_offset))):
        # transformers compiles such a step on a GPU, where the number of its keys would be another graph for each.
        return _noted(dense(), "a step with a cache under torch.compile, or with a static cache on a GPU")
    if torch.compiler.is_compiling():
        return _traced(dense(), q_length, kv_length, q_offset, mask_function, attention_mask, arguments)
    if torch._C._is_tracing():
        return _noted(dense(), "torch.jit.trace hides the parts of the mask")
    known = _parts(mask_function)
    if known is None:
        name = getattr(mask_function, "__qualname__", type(mask_function).__name__).partition(".")[0]
        return _noted(dense(), f"the model's mask function {name} has parts besides causality, windows and documents")
    is_causal = _CAUSAL in known
    length, window = kv_length, UNBOUNDED
    if is_causal:
        length = int(q_offset) + q_length - kv_offset
    if _WINDOW in known:
        window = known[_WINDOW]["sliding_window"] - 1, -1
    elif _BOTH_SIDES in known:
        window = (known[_BOTH_SIDES]["sliding_window"],) * 2
    if max(window) >= length - 1:
        window = UNBOUNDED
    documents = known[_DOCUMENTS]["packed_sequence_mask"] if _DOCUMENTS in known else None
    has_window = window != UNBOUNDED
    are_last = length <= kv_length and (q_length <= length or not (is_causal or has_window))
    if not are_last or (q_length != length and (documents is not None or (has_window and not is_causal))):
        return _noted(dense(), f"{q_length} queries whose places among {kv_length} keys are not the last ones")
    seen: Tensor | None = None
    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + length].bool()
        seen = torch.nn.functional.pad(seen, (0, length - seen.shape[1]))
        seen = None if seen.all() else seen
    tensors = {"documents": documents, "seen": seen}
    scattered = False
    if seen is not None and documents is None:
        tensors["spans"] = _spans(seen)
    if documents is not None or (seen is not None and q_length == length):
        tensors["tokens"], tensors["bounds"], scattered = _sequences(documents, seen)
    size, anchor = (batch_size, 1, q_length, kv_length), torch.empty(0, device=device, dtype=dtype)
    facts = is_causal, window, length, kv_offset, scattered
    return Mask(size, anchor, facts, {name: x for name, x in tensors.items() if x is not None})


def _traced(
    dense: Tensor,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    arguments: dict[str, Any],
) -> Tensor:
    """The mask as a tensor of the graph, with what can be known of it there."""
    if q_length != kv_length or isinstance(q_offset, Tensor) or q_offset:
        return _noted(dense, "there are more keys than queries (a cache)")
    if attention_mask is not None:
        return _noted(dense, "attention_mask under torch.compile, whose padding is data; pack the batch with bounds")
    if arguments.get("use_vmap", False):
        return _noted(dense, "a mask function of the model's own under torch.compile")
    is_causal: bool | None = None
    if mask_function is masking_utils.causal_mask_function:
        is_causal = True
    elif mask_function is masking_utils.bidirectional_mask_function:
        is_causal = False
    return _noted(dense, Traced(is_causal, arguments.get("local_size")))


def _noted(dense: Tensor, note: Traced | str) -> Tensor:
    setattr(dense, NOTE, note)
    return dense


def _parts(function: Callable[..., Any]) -> dict[CodeType, dict[str, Any]] | None:
    """The parts that a mask is the intersection of, with their variables; None if it has others, or two of a kind that
    need both.
    """
    known: dict[CodeType, dict[str, Any]] = {}
    for code, variables in _functions(function):
        if code in _GROUPING:
            continue
        if code is None or code not in _REPEATABLE | _SINGLE or (code in _SINGLE and code in known):
            return None
        known[code] = variables
    if not known or (_WINDOW in known and _BOTH_SIDES in known):
        return None
    return known


def _functions(function: Callable[..., Any]) -> Iterator[tuple[CodeType | None, dict[str, Any]]]:
    """The code of a mask function and of those that it calls, each with the variables that it encloses."""
    code = getattr(function, "__code__", None)
    cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    variables = dict(zip(code.co_freevars, cells, strict=True)) if code else {}
    yield code, variables
    for value in variables.values():
        for inner in value if isinstance(value, tuple) else (value,):
            if callable(inner):
                yield from _functions(inner)


def _spans(seen: Tensor) -> Tensor | None:
    """`spans` of a `Mask`."""
    numbers = seen.to(torch.int32)
    count, first = numbers.sum(1), numbers.argmax(1)
    last = seen.shape[1] - 1 - numbers.flip(1).argmax(1)
    first, end, count = torch.stack([first, torch.where(count > 0, last + 1, first), count]).cpu()
    return torch.stack([first, end], 1) if torch.equal(end - first, count) else None


def _sequences(documents: Tensor | None, seen: Tensor | None) -> tuple[Tensor | None, Tensor, bool]:
    """`tokens`, `bounds` and `scattered` of a `Mask`. Equal numbers of a row are one document, wherever they are."""
    given = documents if documents is not None else seen
    assert given is not None, "there is padding or there are documents"
    batch, length = given.shape
    numbers = torch.zeros_like(given, dtype=torch.int64) if documents is None else documents.to(torch.int64)
    place = torch.arange(length, device=given.device).expand(batch, length)
    if not (numbers.diff(dim=1) >= 0).all():
        numbers, order = numbers.sort(dim=1, stable=True)
        place = place.gather(1, order)
    begins = numbers.diff(dim=1, prepend=numbers[:, :1] - 1) != 0
    document = begins.flatten().cumsum(0)
    token = (place + torch.arange(batch, device=given.device)[:, None] * length).flatten()
    if seen is not None:
        is_seen = seen.flatten()[token]
        token, document = token[is_seen], document[is_seen]
    begins = document.diff(prepend=document[:1] - 1) != 0
    scattered = bool(((token.diff() != 1) & ~begins[1:]).any())
    bounds = torch.cat([begins.nonzero()[:, 0], begins.new_full((1,), len(token), dtype=torch.int64)])
    in_order = len(token) == batch * length and bool((token.diff() == 1).all())
    return None if in_order else token, bounds.to(device="cpu", dtype=torch.int32), scattered
