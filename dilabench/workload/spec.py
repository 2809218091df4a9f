"""Workloads, their FLOPs and bytes, and the requests they come from.

Shape letters: B batch, N sequence length, M queries (the last M of N positions), H query heads, K key/value heads
(H = g·K), D head dim, Dv that of values, T packed tokens.
The function that a workload names is written down in docs/explanation/semantics.md, as are its FLOPs (§2): exact, from
4·D per (query, key) pair of the multiset in a forward call, and 2.5 times that in a backward one (`work`).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dilabench.errors import ConfigError
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pairs, SequenceShape
from dilabench.patterns.registry import (
    AnyPattern,
    has_kind,
    known_kinds,
    pattern_type,
    request_fields,
    with_present_names,
)
from dilabench.units import counted, format_count
from dilabench.validation import READ_COUNT, Extended, Size, content_hash, describe, unknown_key, validated
from dilabench.workload.batch_notation import BATCH, with_batch_fields
from dilabench.workload.model import GENERATE, ModelShape, with_heads
from dilabench.workload.work import flops_per_pair

Mode = Literal["forward", "backward", "both"]
DType = Literal["float64", "float32", "float16", "bfloat16"]
Layout = Literal["padded", "packed"]
Window = tuple[int, int]

MAX_SEQ_LEN = 2**40
UNBOUNDED: Window = (-1, -1)
# Backend or algorithm `auto`: the fastest that supports the call.
AUTO = "auto"
DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
MODE_ALIASES = {"train": "both", "prefill": "forward"}
DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}

# Batch `auto`: constant tokens per batch along a range.
AUTO_TOKENS = 16384
# Packed layout without cu_seqlens (catalog.md §4): bounds in eighths of N.
PACKED_EIGHTHS = (0, 1, 3, 7, 8)
# The pattern of a request without one.
DEFAULT_PATTERN = "dilated"


def check_window(window: Sequence[int], causal: bool) -> None:
    """Raise ValueError unless both sides are -1, for unbounded, or at least 0, and the right one fits a causal mask."""
    if len(window) != 2 or min(window) < -1:
        raise ValueError(f"window {list(window)} must be (left, right) with -1 for unbounded or at least 0")
    if causal and window[1] > 0:
        raise ValueError(
            f"window {list(window)} looks {window[1]} positions ahead but causal=true forbids it; "
            "use a right side of 0 or -1, or causal=false"
        )


def bounds_of_lengths(cu_seqlens: Sequence[int], tokens: int) -> str:
    """The hint for refused bounds that may be lengths of sequences; empty if they cannot be."""
    may_be = min(cu_seqlens) >= 0 and (cu_seqlens[0] > 0 or sum(cu_seqlens) == tokens)
    return "; if these are lengths, their bounds are [0, *lengths.cumsum(0)]" if may_be else ""


# Fields that are written only if they are given, and those that they equal by default.
_ADDED = {"query_len": "seq_len", "value_dim": "head_dim", "softcap": "", "model": ""}


class Workload(Extended):
    """One attention computation: pattern, shape, dtype and timed mode. No field is `auto`.

    `query_len` M: the queries are the last M of `seq_len` N positions, query i at position N - M + i, and all N have
    keys and values (semantics.md §6). None if every position has a query. `seq_len` always counts the keys.
    `value_dim`: channels of values and out, None for `head_dim`. `softcap` c: scores s become c·tanh(s/c), after the
    scale and before masks.
    `model`: the computation is a step of this model, whose layers compute such an attention each: in mode `both` the
    losses of all tokens and their gradients, in mode `forward` the last hidden states, with `query_len` the logits of
    tokens that are generated one by one. None: attention alone.
    """

    later: ClassVar = _ADDED
    pattern: AnyPattern
    batch_size: int = Field(ge=1, le=2**24)
    seq_len: int = Field(ge=1, le=MAX_SEQ_LEN)
    num_heads: int = Field(ge=1, le=2**14)
    num_kv_heads: int = Field(ge=1, le=2**14)
    head_dim: int = Field(ge=1, le=2**12)
    dtype: DType = "float32"
    causal: bool = True
    window: Window = UNBOUNDED
    scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    mode: Mode = "forward"
    layout: Layout = "padded"
    cu_seqlens: tuple[int, ...] | None = None
    query_len: int | None = Field(default=None, ge=1)
    value_dim: int | None = Field(default=None, ge=1, le=2**12)
    softcap: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    model: ModelShape | None = None

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_alias(cls, value: Any) -> Any:
        return DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("query_len", "value_dim")
    @classmethod
    def _the_usual_is_none(cls, value: int | None, info: ValidationInfo) -> int | None:
        return None if value == info.data.get(_ADDED[info.field_name or ""]) else value

    @model_validator(mode="wrap")
    @classmethod
    def _shape_is_possible(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # One that is in a row is checked once.
        if isinstance(data, cls):
            return data
        workload = handler(data)
        workload._check_shape()
        return workload

    def _check_shape(self) -> None:
        if self.num_heads % self.num_kv_heads:
            divisors = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"num_kv_heads may be {', '.join(map(str, divisors))}"
            )
        if max(self.window) > MAX_SEQ_LEN:
            raise ValueError("window reaches over 2^40 positions, more than any sequence has; use -1 for unbounded")
        check_window(self.window, self.causal)
        if self.layout == "packed":
            self._check_packed()
        elif self.cu_seqlens is not None:
            raise ValueError("cu_seqlens is given but layout is 'padded'; set layout=packed or leave cu_seqlens out")
        if self.query_len is not None:
            self._check_queries(self.query_len)
        if self.model is not None:
            self.model.check_lengths(self.batch_size, self.seq_len, self.query_len or 0, packed=self.layout == "packed")
        for shape in dict.fromkeys(self.shapes):
            if reason := self.pattern.why_not_over(shape):
                raise ValueError(reason)

    def _check_queries(self, rows: int) -> None:
        if rows > self.seq_len:
            raise ValueError(
                f"query_len {rows} is more than seq_len {self.seq_len}: the queries are the last rows of their keys; "
                f"use at most {self.seq_len}, or a longer seq_len"
            )
        if self.layout == "packed":
            raise ValueError(
                f"query_len {rows} with layout 'packed': packed sequences have a query at every position; "
                "leave query_len out, or use layout=padded with batch_size"
            )

    def _check_packed(self) -> None:
        bounds = self.cu_seqlens
        if not bounds:
            raise ValueError("layout 'packed' needs cu_seqlens, for example cu_seqlens=0,512,1024")
        if bounds[0] != 0 or bounds[-1] != self.seq_len or any(a >= b for a, b in itertools.pairwise(bounds)):
            shown = ", ".join(map(str, bounds if len(bounds) < 8 else (*bounds[:3], "...", bounds[-1])))
            raise ValueError(
                f"cu_seqlens [{shown}] must rise from 0 to seq_len={self.seq_len} (the number of packed tokens); "
                f"give one of the two alone{bounds_of_lengths(bounds, self.seq_len)}"
            )
        if self.batch_size != 1:
            raise ValueError(
                f"layout 'packed' holds all sequences in one batch row; batch_size is {self.batch_size}, use 1"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head (g)."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """The scale in force: the given one, or 1/sqrt(D)."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def value_width(self) -> int:
        """Channels of values and out (Dv)."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the sequences along the N axis: one when padded, several when packed."""
        return tuple(itertools.pairwise(self.cu_seqlens or (0, self.seq_len)))

    @property
    def shapes(self) -> tuple[SequenceShape, ...]:
        """The sequences to which the pattern applies."""
        return tuple(
            SequenceShape(end - start, self.num_heads, self.num_kv_heads, self.causal, self.window)
            for start, end in self.sequences
        )

    @property
    def is_dense(self) -> bool:
        """Return True if every query sees every key of its sequence, apart from causal mask and window."""
        return all(self.pattern.is_dense(shape) for shape in dict.fromkeys(self.shapes))

    @property
    def detaches_merge(self) -> bool:
        """Return True if gradients are computed with the weights of a merge as constants (semantics.md §2)."""
        return self.mode != "forward" and self.pattern.is_detached

    @property
    def has_given_length(self) -> bool:
        """Return True if its length is fixed by bounds of packed sequences or by the pattern."""
        return self.layout == "packed" or self.pattern.has_fixed_length

    def as_dense(self) -> "Workload":
        """The same shape with every key visible, as dense kernels and unranked references compute."""
        return self.model_copy(update={"pattern": DENSE})

    @property
    def rows(self) -> int:
        """Queries of one sequence (M): all positions, or the last `query_len`; packed: of all sequences."""
        return self.seq_len if self.query_len is None else self.query_len

    @property
    def first_row(self) -> int:
        """The position of the first query (N - M)."""
        return self.seq_len - self.rows

    @property
    def tokens(self) -> int:
        """Query tokens in one call (B·M)."""
        return self.batch_size * self.rows

    @property
    def density(self) -> float:
        """Computed pairs / pairs of full attention under the same mask and window, of the rows that have queries.

        Pairs count as often as they are attended, so overlapping parts may exceed 1.
        """
        if self.query_len is None:
            return self.pattern.density_of(self.shapes)
        return attended_pairs(self) / attended_pairs(self.as_dense())

    @property
    def positions(self) -> int:
        """Tokens that have keys and values in one call (B·N)."""
        return self.batch_size * self.seq_len

    def replace(self, **changes: Any) -> "Workload":
        """A validated copy with the fields changed."""
        return Workload.model_validate({**dict(self), **changes})

    def family_id(self) -> str:
        """Hash of everything that changes values, except shape: rows are ranked only inside one family and workload."""
        content = {"pattern": self.pattern.model_dump(), **self.model_dump(include={"causal", "window", "scale"})}
        return content_hash(content if self.softcap is None else {**content, "softcap": self.softcap})

    def length_label(self) -> str:
        """Keys of a sequence, with its queries if they are fewer: '64K', '1 of 64K'."""
        return ("" if self.query_len is None else f"{format_count(self.query_len)} of ") + format_count(self.seq_len)

    def dim_label(self) -> str:
        """'D64', or with values of another width 'D192/128'."""
        return f"D{self.head_dim}" if self.value_dim is None else f"D{self.head_dim}/{self.value_dim}"

    def queries_label(self) -> str:
        """'every query', or how many of the last there are: '1 query row'."""
        return "every query" if self.query_len is None else counted(self.query_len, "query row")

    def label(self) -> str:
        """A short name for tables, e.g. '2x8K H8 D64 bf16 causal', '64x1 of 32K H32/8 D128 bf16 causal'."""
        short = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        heads = f"H{self.num_heads}" + (f"/{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else "")
        window = "" if self.window == UNBOUNDED else f" window {self.window[0]},{self.window[1]}"
        causal = " causal" if self.causal else ""
        packed = " packed" if self.layout == "packed" else ""
        packed += " padded" if self.model is not None and self.model.lengths is not None else ""
        scale = "" if self.scale is None else f" scale {self.scale:g}"
        scale += "" if self.softcap is None else f" softcap {self.softcap:g}"
        shape = f"{self.batch_size}x{self.length_label()} {heads} {self.dim_label()}"
        model = "" if self.model is None else f"{self.model.name} "
        return f"{model}{shape} {short}{causal}{window}{scale}{packed}"


def attended_pairs(workload: Workload) -> int:
    """(query, key) pairs of the multiset in one forward call, over batch and heads."""
    return workload.batch_size * sum(pairs.attended for pairs in _pairs(workload))


def least_pairs(workload: Workload) -> int:
    """A lower bound of the distinct pairs, which every implementation must compute."""
    return workload.batch_size * sum(pairs.least for pairs in _pairs(workload))


def _pairs(workload: Workload) -> Iterator[Pairs]:
    """The pairs of each sequence of a batch item, of the rows that have queries."""
    for shape in workload.shapes:
        if workload.query_len is None:
            yield workload.pattern.pairs(shape)
        else:
            yield workload.pattern.last_rows(shape, workload.query_len).pairs


def flops(workload: Workload, pairs: int | None = None) -> float:
    """FLOPs of one call in the workload's mode over `pairs`, by default all of the multiset, even if an implementation
    computes fewer.
    """
    pairs = attended_pairs(workload) if pairs is None else pairs
    return float(flops_per_pair(workload.mode, workload.head_dim, workload.value_width) * pairs)


def tensor_bytes(workload: Workload) -> dict[str, int]:
    """Bytes of q, k, v, out and lse of the workload; k and v count once, however many queries read them."""
    item = DTYPE_BYTES[workload.dtype]
    query = workload.tokens * workload.num_heads * workload.head_dim * item
    key = workload.positions * workload.num_kv_heads * workload.head_dim * item
    value, out = (size // workload.head_dim * workload.value_width for size in (key, query))
    lse = workload.tokens * workload.num_heads * (8 if workload.dtype == "float64" else 4)
    return {"q": query, "k": key, "v": value, "out": out, "lse": lse}


class WorkloadRequest(Extended):
    """A workload as a user writes it: flat, every field optional, `auto` where the tool may choose.

    Presets, TOML files, `--set` and the short options all fill this one model. It also takes the fields of every
    installed pattern (`Pattern.request_model`): the requested pattern uses its fields, the others apply if a suite
    measures their pattern. `batch="2q2k_4q512"` stands for other fields (`batch_notation`). `resolve`
    returns the Workload, which differs only in the fields that are `auto` here.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    later: ClassVar = _ADDED
    pattern: str = DEFAULT_PATTERN
    batch_size: Annotated[int | Literal["auto"], READ_COUNT] = "auto"
    seq_len: Size = 8192
    num_heads: Size = 8
    num_kv_heads: Annotated[int | None, READ_COUNT] = None
    head_dim: Size = 64
    dtype: Literal[DType, "auto"] = "auto"
    causal: bool = True
    window: Window = UNBOUNDED
    scale: float | None = None
    mode: Mode | Literal["generate"] = "forward"
    layout: Layout = "padded"
    cu_seqlens: tuple[int, ...] | None = None
    query_len: Annotated[int | None, READ_COUNT] = None
    value_dim: Annotated[int | None, READ_COUNT] = None
    softcap: float | None = None
    model: ModelShape | None = None

    @field_validator("window", "cu_seqlens", mode="before")
    @classmethod
    def _int_list(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.strip("()[] ").split(","))
        if info.field_name == "window" and (not isinstance(value, list | tuple) or len(value) != 2):
            raise ValueError(f"window {value!r} must be two numbers, left and right; write for example 512,0")
        return value

    @field_validator("dtype", "mode", mode="before")
    @classmethod
    def _alias(cls, value: Any) -> Any:
        return (DTYPE_ALIASES | MODE_ALIASES).get(value, value) if isinstance(value, str) else value

    @field_validator("pattern")
    @classmethod
    def _installed(cls, value: str) -> str:
        try:
            pattern_type(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="before")
    @classmethod
    def _pattern_fields(cls, data: Any) -> Any:
        """Validate fields that do not belong to the shape by the pattern that has such a field."""
        if not isinstance(data, dict):
            return data
        if BATCH in data or data.get("cu_seqlens"):
            data = with_batch_fields(data)
        if data.get("model") is not None:
            data = {"pattern": DENSE.kind, **with_heads(data)}
        kind_name = data.get("pattern", DEFAULT_PATTERN)
        fields_of_kind = (
            pattern_type(kind_name).request_model().model_fields.keys() - {"kind"}
            if has_kind(kind_name)
            else frozenset()
        )
        if not data.keys() <= cls.model_fields.keys() | fields_of_kind:
            # Only now are other kinds considered, because that loads plug-ins.
            data = with_present_names(data)
        unread = data.keys() - cls.model_fields.keys()
        read: dict[str, Any] = {}
        refusals: dict[str, str] = {}
        # A field without its pattern, which a preset may bring, must be right for one kind that has it.
        kinds = () if unread <= fields_of_kind else known_kinds()
        for kind in dict.fromkeys([*([kind_name] if fields_of_kind else []), *kinds]):
            model = pattern_type(kind).request_model()
            if names := unread & model.model_fields.keys() - {"kind"}:
                try:
                    checked = model.model_validate({name: data[name] for name in names})
                except ValidationError as error:
                    refusals[kind] = describe(error, model)
                    if kind == kind_name:
                        break
                else:
                    read |= {name: getattr(checked, name) for name in names}
                    unread -= names
            if not unread:
                break
        if unknown := unread - request_fields() if unread else unread:
            raise ValueError(unknown_key(min(unknown), {*cls.model_fields, *request_fields()}))
        if unread:
            several = len({*refusals.values()}) > 1
            raise ValueError("; ".join(f"{why} (pattern {kind})" if several else why for kind, why in refusals.items()))
        return {**data, **read}

    def pattern_field(self, name: str) -> Any:
        """The value of a field of the requested pattern, or its default."""
        fields = pattern_type(self.pattern).request_model().model_fields
        return (self.model_extra or {}).get(name, fields[name].get_default())

    def resolve(self, auto_dtype: DType, auto_tokens: int = AUTO_TOKENS) -> Workload:
        """Return the workload on a device with this `auto` dtype and this many tokens per call with batch `auto`.

        Raises ConfigError when the shape is impossible.
        """
        if self.mode == GENERATE:
            raise ConfigError("mode 'generate' is two workloads of a model, which suite `model` plans; use forward")
        fields = {**self.__dict__, "num_kv_heads": self.num_kv_heads or self.num_heads}
        fields["pattern"] = pattern_type(self.pattern).of_request(self.model_extra or {})
        if self.layout == "packed" and self.cu_seqlens is None:
            fields["cu_seqlens"] = tuple(self.seq_len * eighths // 8 for eighths in PACKED_EIGHTHS)
        if self.batch_size == "auto":
            fields["batch_size"] = 1 if self.layout == "packed" else max(1, auto_tokens // self.seq_len)
        if self.dtype == "auto":
            fields["dtype"] = auto_dtype
        return validated(Workload, fields)
