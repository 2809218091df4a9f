"""What is computed: patterns, workloads, and the requests they come from.

Shape letters: B batch, N sequence length, H query heads, K key/value heads (H = g·K), D head dim, T packed tokens.
The function that a workload names is written down in docs/explanation/semantics.md.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from dilabench.errors import ConfigError
from dilabench.patterns.mask_files import mask_digest
from dilabench.refusal import describe
from dilabench.units import format_count, parse_count

Mode = Literal["forward", "backward", "both"]
DType = Literal["float64", "float32", "float16", "bfloat16"]
Layout = Literal["padded", "packed"]
Window = tuple[int, int]

ModelT = TypeVar("ModelT", bound=BaseModel)

UNBOUNDED: Window = (-1, -1)
DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}

# Branches `auto` (catalog.md §3): the same along a range, so that only the length changes.
AUTO_SEGMENTS = (2048, 4096, 8192, 16384, 32768)
AUTO_RATES = (1, 2, 4, 8, 16)
# Batch `auto`: constant tokens per batch along a range.
AUTO_TOKENS = 16384
# Packed layout without cu_seqlens (catalog.md §4): bounds in eighths of N.
PACKED_EIGHTHS = (0, 1, 3, 7, 8)


class Model(BaseModel):
    """Base of all data that crosses a boundary: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def read_counts(value: Any, what: str) -> Any:
    """Let lists of sizes be written as '2K,4K', [2048, '4K'] or, when there is one, 2048."""
    if isinstance(value, str):
        value = [part for part in value.strip("()[] ").split(",") if part.strip()]
    elif isinstance(value, int):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple(parse_count(item, what) if isinstance(item, str | int) else item for item in value)
    return value


class DensePattern(Model):
    """Every query sees every key."""

    kind: Literal["dense"] = "dense"


class DilatedPattern(Model):
    """LongNet's dilated attention: branches (segment length w, dilation rate r), merged as one softmax.

    A branch lets i see j when both lie in the same segment of w positions and both sit on the head's residue
    `offset(h, r)` inside it. Keys that several branches give are counted several times (semantics.md §1, §2).
    """

    kind: Literal["dilated"] = "dilated"
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    heads: Literal["all", "grouped"] = "all"
    offset: Literal["modulo", "blocked"] = "modulo"
    offset_by: Literal["head", "kv_head"] = "head"
    merge_grad: Literal["exact", "detached"] = "exact"

    @field_validator("segment_lengths", "dilation_rates", mode="before")
    @classmethod
    def _sizes(cls, value: Any, info: ValidationInfo) -> Any:
        return read_counts(value, str(info.field_name))

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        segments, rates = self.segment_lengths, self.dilation_rates
        if len(segments) != len(rates):
            raise ValueError(
                f"{len(segments)} segment lengths {list(segments)} but {len(rates)} dilation rates {list(rates)}; "
                "they pair up, give as many of one as of the other"
            )
        if not segments:
            raise ValueError("a dilated pattern needs at least one branch; give for example segment_lengths=2K,4K")
        return self

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """The (segment length, dilation rate) pairs."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))


MaskKind = Literal["local_window", "global_local", "dilated_sparse", "strided", "hierarchical", "random", "custom"]


class BlockSparsePattern(Model):
    """Blocks of queries see blocks of keys: C = 1 where the mask of (head, i // block, j // block) is set.

    `sparsity` is the share of visible blocks that is not computed. With branches (`segment_lengths`, `dilation_rates`)
    the mask lies over the rows that each dilated branch keeps in a segment, instead of over the whole sequence.
    The masks themselves are made in `dilabench.patterns.block_masks`.
    """

    kind: Literal["block_sparse"] = "block_sparse"
    mask: MaskKind = "local_window"
    block_size: int = Field(default=128, ge=1, le=2**20)
    sparsity: float = Field(default=0.9, ge=0, lt=1)
    seed: int = Field(default=0, ge=0)
    per_head: bool = False
    mask_file: str | None = None
    mask_digest: str | None = None
    branches: DilatedPattern | None = None

    @model_validator(mode="after")
    def _file_or_kind(self) -> Self:
        if (self.mask == "custom") != (self.mask_file is not None):
            raise ValueError("mask 'custom' and a mask file need each other; give both or neither")
        return self

    @property
    def per_head_masks(self) -> bool:
        """Whether heads may differ in their masks: asked for, or possible in a file."""
        return self.per_head or self.mask == "custom"


Pattern = Annotated[DensePattern | DilatedPattern | BlockSparsePattern, Field(discriminator="kind")]


class Workload(Model):
    """One attention computation: pattern, shape, dtype and what is timed of it. Nothing in it is `auto`."""

    pattern: Pattern
    batch_size: int = Field(ge=1, le=2**24)
    seq_len: int = Field(ge=1, le=2**40)
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

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_alias(cls, value: Any) -> Any:
        return DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _shape_is_possible(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            divisors = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"num_kv_heads may be {', '.join(map(str, divisors))}"
            )
        if min(self.window) < -1:
            raise ValueError(f"window {list(self.window)} must be (left, right) with -1 for unbounded or at least 0")
        if self.causal and self.window[1] > 0:
            raise ValueError(
                f"window {list(self.window)} looks {self.window[1]} positions ahead but causal=true forbids it; "
                "use a right side of 0 or -1, or causal=false"
            )
        if self.layout == "packed":
            self._check_packed()
        elif self.cu_seqlens is not None:
            raise ValueError("cu_seqlens is given but layout is 'padded'; set layout=packed or leave cu_seqlens out")
        return self

    def _check_packed(self) -> None:
        bounds = self.cu_seqlens
        if bounds is None:
            raise ValueError("layout 'packed' needs cu_seqlens, for example cu_seqlens=0,512,1024")
        if bounds[0] != 0 or bounds[-1] != self.seq_len or any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ValueError(
                f"cu_seqlens {list(bounds)} must rise from 0 to seq_len={self.seq_len} (the number of packed tokens)"
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
    def dilated(self) -> DilatedPattern | None:
        """The branches of the pattern: its own, or those that a block mask lies over."""
        if isinstance(self.pattern, BlockSparsePattern):
            return self.pattern.branches
        return self.pattern if isinstance(self.pattern, DilatedPattern) else None

    @property
    def softmax_scale(self) -> float:
        """The scale in force: the given one, or 1/sqrt(D)."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the sequences along the N axis: one when padded, several when packed."""
        bounds = self.cu_seqlens or (0, self.seq_len)
        return tuple(itertools.pairwise(bounds))

    @property
    def tokens(self) -> int:
        """Tokens in one call (B·N)."""
        return self.batch_size * self.seq_len

    def replace(self, **changes: Any) -> "Workload":
        """A validated copy with the fields changed."""
        return Workload.model_validate({**self.model_dump(), **changes})

    def family_id(self) -> str:
        """Hash of everything that changes values, except shape: rows are ranked only inside one family and workload."""
        content = {
            "pattern": self.pattern.model_dump(),
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
        }
        return content_hash(content)

    def label(self) -> str:
        """A short name for tables, e.g. '2x8K H8 D64 bf16 causal'."""
        short = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[self.dtype]
        heads = f"H{self.num_heads}" + (f"/{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else "")
        window = "" if self.window == UNBOUNDED else f" window {self.window[0]},{self.window[1]}"
        causal = " causal" if self.causal else ""
        packed = " packed" if self.layout == "packed" else ""
        shape = f"{self.batch_size}x{format_count(self.seq_len)} {heads} D{self.head_dim}"
        return f"{shape} {short}{causal}{window}{packed}"


class WorkloadRequest(Model):
    """A workload as a user writes it: flat, every field optional, `auto` where the tool may choose.

    Presets, TOML files, `--set` and the short options all fill this one model. `resolve` makes the Workload;
    the two differ only where `auto` stands here.
    """

    pattern: Literal["dense", "dilated", "block_sparse"] = "dilated"
    batch_size: int | Literal["auto"] = "auto"
    seq_len: int = 8192
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int = 64
    dtype: Literal[DType, "auto"] = "auto"
    causal: bool = True
    window: Window = UNBOUNDED
    scale: float | None = None
    mode: Mode = "forward"
    layout: Layout = "padded"
    cu_seqlens: tuple[int, ...] | None = None
    segment_lengths: tuple[int, ...] | Literal["auto"] = "auto"
    dilation_rates: tuple[int, ...] | Literal["auto"] = "auto"
    heads: Literal["all", "grouped"] = "all"
    offset: Literal["modulo", "blocked"] = "modulo"
    offset_by: Literal["head", "kv_head"] = "head"
    merge_grad: Literal["exact", "detached"] = "exact"
    mask: MaskKind = "local_window"
    block_size: int = 128
    sparsity: float = 0.9
    mask_seed: int = 0
    per_head: bool = False
    mask_file: str | None = None

    @field_validator("batch_size", "block_size", "seq_len", "num_heads", "num_kv_heads", "head_dim", mode="before")
    @classmethod
    def _size(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or value == "auto":
            return value
        return parse_count(value if isinstance(value, int) else str(value), str(info.field_name))

    @field_validator("segment_lengths", "dilation_rates", mode="before")
    @classmethod
    def _sizes(cls, value: Any, info: ValidationInfo) -> Any:
        return value if value == "auto" else read_counts(value, str(info.field_name))

    @field_validator("window", "cu_seqlens", mode="before")
    @classmethod
    def _int_list(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.strip("()[] ").split(","))
        if info.field_name == "window" and (not isinstance(value, list | tuple) or len(value) != 2):
            raise ValueError(f"window {value!r} must be two numbers, left and right; write for example 512,0")
        return value

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_alias(cls, value: Any) -> Any:
        return DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value

    def resolve(self, auto_dtype: DType) -> Workload:
        """The effective workload on a device whose `auto` dtype is the given one.

        Raises ConfigError when the shape is impossible.
        """
        fields = self.model_dump(exclude={"pattern", *DILATED_FIELDS, *BLOCK_SPARSE_FIELDS})
        fields["num_kv_heads"] = self.num_kv_heads or self.num_heads
        fields["pattern"] = self._pattern()
        if self.layout == "packed" and self.cu_seqlens is None:
            fields["cu_seqlens"] = tuple(self.seq_len * eighths // 8 for eighths in PACKED_EIGHTHS)
        if self.batch_size == "auto":
            fields["batch_size"] = 1 if self.layout == "packed" else max(1, AUTO_TOKENS // self.seq_len)
        if self.dtype == "auto":
            fields["dtype"] = auto_dtype
        return validated(Workload, fields)

    def _pattern(self) -> dict[str, Any]:
        if self.pattern == "dense":
            return {"kind": "dense"}
        if self.pattern == "block_sparse":
            composed = self.segment_lengths != "auto" or self.dilation_rates != "auto"
            return {
                "kind": "block_sparse",
                "mask": "custom" if self.mask_file else self.mask,
                "block_size": self.block_size,
                "sparsity": 0.0 if self.mask_file else self.sparsity,
                "seed": self.mask_seed,
                "per_head": self.per_head,
                "mask_file": self.mask_file,
                "mask_digest": mask_digest(Path(self.mask_file)) if self.mask_file else None,
                "branches": self._dilated() if composed else None,
            }
        return self._dilated()

    def _dilated(self) -> dict[str, Any]:
        segments, rates = self.segment_lengths, self.dilation_rates
        if segments == "auto":
            segments = AUTO_SEGMENTS if rates == "auto" else AUTO_SEGMENTS[: len(rates)]
        if rates == "auto":
            rates = AUTO_RATES if len(segments) == len(AUTO_RATES) else tuple(2**k for k in range(len(segments)))
        return {
            "kind": "dilated",
            "segment_lengths": segments,
            "dilation_rates": rates,
            "heads": self.heads,
            "offset": self.offset,
            "offset_by": self.offset_by,
            "merge_grad": self.merge_grad,
        }


DILATED_FIELDS = ("segment_lengths", "dilation_rates", "heads", "offset", "offset_by", "merge_grad")
BLOCK_SPARSE_FIELDS = ("mask", "block_size", "sparsity", "mask_seed", "per_head", "mask_file")


def validated(model: type[ModelT], fields: dict[str, Any]) -> ModelT:
    """Build a pydantic model; a refusal becomes a ConfigError with value, rule and place."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(describe(error, model)) from None


def content_hash(content: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the content's canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
