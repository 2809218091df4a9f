"""Bounds of columns: one or two ranges of rows from which each key is hidden (FlashMask, Wang et al. 2024).

Documents, prefixes and shared questions are such bounds in O(N) memory; a file can hold any others. semantics.md §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, cycle, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from dilabench.errors import ConfigError
from dilabench.patterns.answers import HiddenRows, SequenceShape
from dilabench.patterns.hidden_rows import HiddenRowsPattern, hidden_once
from dilabench.patterns.mask_files import Given, GivenByFile, read_array
from dilabench.validation import Model, Size, Sizes

if TYPE_CHECKING:
    from dilabench.patterns.answers import Positions

BoundsKind = Literal["documents", "prefix_documents", "shared_question", "file"]
DEFAULT_LENGTHS = (300, 1500, 700, 4000, 2500, 8000)
# Verification always samples the edges of up to this many ranges.
MAX_EDGES = 64


class ColumnBoundsRequest(Model):
    """Request fields of bounds."""

    bounds: BoundsKind = "documents"
    document_lengths: Sizes = DEFAULT_LENGTHS
    lead: int = Field(default=256, ge=0)
    answers: Size = Field(default=4, ge=1)
    bounds_file: str | None = None


class ColumnBoundsPattern(ColumnBoundsRequest, GivenByFile, HiddenRowsPattern):
    """C[h, i, j] = 0 if row i is in a range of key j, else 1.

    `document_lengths` repeat until the sequence is full; the last document may be short. `bounds` selects the mask:
    documents: rows see the keys of their own document.
    prefix_documents: like documents, and a key behind its document's first `lead` is hidden from the rows before it.
    shared_question: the first `lead` tokens of a document are a question, which all its rows see; the rest is cut into
    `answers` equal parts, which see themselves and the question (FlashMask §3; DPO, reward models).
    file: a `.npy` file of integers [ranges, 2, N]: starts and stops of the ranges of rows that each key is hidden from.
    """

    kind: Literal["column_bounds"] = "column_bounds"
    bounds_digest: str | None = None

    given_whole_by: ClassVar[frozenset[str]] = frozenset({"bounds_file"})
    given: ClassVar[Given] = Given("bounds", "bounds", "file", "bounds=file and a bounds_file")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.document_lengths or min(self.document_lengths) < 1:
            raise ValueError(f"document_lengths {list(self.document_lengths)} must be at least 1 each")
        return self

    @classmethod
    def request_model(cls) -> type[Model]:
        """Omits the digest, which is computed from the file."""
        return ColumnBoundsRequest

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Documents of one token and longer than the sequence; leads longer than their documents; uneven answers."""
        return (
            cls(document_lengths=(17, 1, 30)),
            cls(bounds="prefix_documents", document_lengths=(23, 5), lead=7),
            cls(bounds="shared_question", document_lengths=(31, 9), lead=4, answers=3),
            cls(document_lengths=(4000,)),
        )

    @classmethod
    def trials(cls) -> Mapping[str, Mapping[str, Any]]:
        """Every kind of bounds; prefixes differ from documents only without a causal mask."""
        lengths = {"document_lengths": (70, 3, 40)}
        requests: dict[str, dict[str, Any]] = {
            "documents": {"bounds": "documents"},
            "documents-full": {"bounds": "documents", "causal": False},
            "prefix-documents": {"bounds": "prefix_documents", "lead": 9, "causal": False},
            "shared-question": {"bounds": "shared_question", "lead": 9, "answers": 3},
        }
        return {name: {**lengths, **fields} for name, fields in requests.items()}

    @classmethod
    def densities(cls, length: int) -> tuple[Mapping[str, Any], ...]:
        """2 to 32 documents of one length."""
        return tuple({"document_lengths": (-(-length // count),)} for count in (2, 8, 32))

    def label(self) -> str:
        """'column-bounds documents 1024,3072' and the other fields that the kind of bounds reads."""
        if self.bounds == "file":
            return f"column-bounds {self.bounds_file}"
        read_besides = {
            "prefix_documents": f" lead={self.lead}",
            "shared_question": f" lead={self.lead} answers={self.answers}",
        }
        lengths = ",".join(map(str, self.document_lengths))
        return f"column-bounds {self.bounds} {lengths}{read_besides.get(self.bounds, '')}"

    def why_not_over(self, shape: SequenceShape) -> str | None:
        """Under a causal mask prefix_documents would equal documents."""
        if self.bounds == "prefix_documents" and shape.causal:
            return "bounds=prefix_documents is already causal except in its prefixes; use it with causal=false"
        return None

    def hidden_rows(self, shape: SequenceShape) -> HiddenRows:
        """The ranges of the chosen kind of bounds. Raises ConfigError for a file that does not fit."""
        return hidden_once(_hidden_rows, self, shape.length)

    def edges(self, shape: SequenceShape) -> Positions:
        """Starts and stops of ranges; if there are too many, an evenly spaced subset."""
        hidden = self.hidden_rows(shape)
        edges = np.unique(np.concatenate([hidden.starts.ravel(), hidden.stops.ravel()]))
        edges = edges[(edges > 0) & (edges < shape.length)]
        return edges if len(edges) <= MAX_EDGES else edges[np.linspace(0, len(edges) - 1, MAX_EDGES).astype(np.int64)]

    def document_starts(self, length: int) -> Positions:
        """The starts of documents, 0 first."""
        starts = takewhile(lambda start: start < length, accumulate(cycle(self.document_lengths), initial=0))
        return np.fromiter(starts, dtype=np.int64)


Ranges = tuple[tuple["Positions", "Positions"], ...]


def _documents(pattern: ColumnBoundsPattern, keys: Positions, start: Positions, stop: Positions) -> Ranges:  # noqa: ARG001
    """Keys are hidden from the rows of all other documents."""
    return _outside(start, stop, len(keys))


def _prefix_documents(pattern: ColumnBoundsPattern, keys: Positions, start: Positions, stop: Positions) -> Ranges:
    """Keys behind the prefix are also hidden from earlier rows of their document."""
    return _outside(np.where(keys < start + pattern.lead, start, keys), stop, len(keys))


def _shared_question(pattern: ColumnBoundsPattern, keys: Positions, start: Positions, stop: Positions) -> Ranges:
    """Keys of an answer are hidden from all rows outside it."""
    first = np.minimum(start + pattern.lead, stop)
    answer_tokens = np.maximum(stop - first, 1)
    part = (keys - first) * pattern.answers // answer_tokens
    # Part p holds the places x with x * answers // answer_tokens = p.
    edges = (first + -(-(part + more) * answer_tokens // pattern.answers) for more in (0, 1))
    begin, end = (np.where(keys < first, whole, edge) for whole, edge in zip((start, stop), edges, strict=True))
    return _outside(begin, end, len(keys))


MAKERS: Mapping[str, Callable[[ColumnBoundsPattern, Positions, Positions, Positions], Ranges]] = {
    "documents": _documents,
    "prefix_documents": _prefix_documents,
    "shared_question": _shared_question,
}


def _outside(start: Positions, stop: Positions, length: int) -> Ranges:
    """Hide each key from the rows before `start` and from `stop` on."""
    return (np.zeros_like(start), start), (stop, np.full_like(stop, length))


def _hidden_rows(pattern: ColumnBoundsPattern, length: int) -> HiddenRows:
    if pattern.bounds_file is not None:
        return _from_file(pattern.bounds_file, pattern.bounds_digest, length)
    keys = np.arange(length)
    starts = pattern.document_starts(length)
    document = starts.searchsorted(keys, side="right") - 1
    stops = np.append(starts[1:], length)
    return HiddenRows.of(length, *MAKERS[pattern.bounds](pattern, keys, starts[document], stops[document]))


def _from_file(name: str, digest: str | None, length: int) -> HiddenRows:
    bounds = read_array(Path(name), digest, "bounds", "integers [ranges, 2, N]")
    if not np.issubdtype(bounds.dtype, np.integer) or bounds.ndim != 3 or bounds.shape[1] != 2 or not len(bounds):
        raise ConfigError(
            f"bounds file {name!r} holds {bounds.dtype} {list(bounds.shape)}; give integers [ranges, 2, N]: the first "
            "and one past the last row of each range that a key is hidden from"
        )
    if bounds.shape[2] != length:
        raise ConfigError(f"bounds file {name!r} has {bounds.shape[2]} columns; the sequence has {length} keys")
    wrong = (bounds < 0) | (bounds > length)
    if wrong.any():
        place, side, key = (int(at[0]) for at in wrong.nonzero())
        raise ConfigError(
            f"bounds file {name!r}, range {place}, key {key}: row {bounds[place, side, key]} is not in 0..{length}"
        )
    return HiddenRows.of(length, *((part[0], part[1]) for part in bounds))
