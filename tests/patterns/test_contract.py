"""What a pattern answers by itself is what follows from its counts, for every kind and for one of a third party."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dilabench.conformance.pattern import QUESTIONS, SHAPES, matrix
from dilabench.errors import ConfigError, PluginError
from dilabench.patterns import registry
from dilabench.patterns.dense import DENSE, DensePattern
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.patterns.registry import PatternKind, known_kinds, load, pattern_type, read_pattern
from dilabench.patterns.selected_blocks import SelectedBlocksPattern
from dilabench.validation import validated
from dilabench.workload.spec import Workload, WorkloadRequest
from tests.conftest import half_are_slow

EXAMPLE = Path(__file__).parents[1] / "example_plugin" / "dilabench_example" / "chunked.py"
SHAPE = SequenceShape(61, 4, 2, True, (-1, -1))


def third_party() -> type[Pattern]:
    spec = importlib.util.spec_from_file_location("chunked_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ChunkedPattern


KINDS = ("dense", "dilated", "block_sparse", "window_sink", "column_bounds", "topk_blocks", "selected_blocks")
BUILT_IN = [pattern_type(kind) for kind in KINDS]
EXAMPLES = [example for kind in (*BUILT_IN, third_party()) for example in kind.examples()]


WRONG = [
    (kind, {**kind.examples()[0].__dict__, name: ["wrong", None]}, name)
    for kind in (*BUILT_IN, third_party())
    for name in ("no_field", *kind.model_fields)
]


@pytest.mark.parametrize(("kind", "fields", "name"), WRONG, ids=[f"{kind.__name__}-{name}" for kind, _, name in WRONG])
def test_a_constructor_refuses_values_in_a_sentence(kind: type[Pattern], fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name) as refusal:
        kind(**fields)
    assert "http" not in str(refusal.value)
    assert "validation error" not in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 17}, "block_size 17 is neither 1 nor a multiple of 16; use 32"),
        ({"block_size": None}, "block_size None should be a valid integer"),
        ({"block_size": 0}, "block_size 0 must be at least 1"),
        ({"blocksize": 64}, "blocksize: unknown key; did you mean block_size?"),
    ],
    ids=str,
)
def test_a_constructor_says_what_a_request_does(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SelectedBlocksPattern(**fields)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        validated(SelectedBlocksPattern, fields)


def name_of(value: Any) -> str:
    return value.label() if isinstance(value, Pattern) else str(value)


# In the default set neighbours, which are mostly of one kind, alternate in what they are asked.
@pytest.mark.parametrize(("pattern", "question"), half_are_slow(EXAMPLES, QUESTIONS), ids=name_of)
def test_every_answer_follows_from_the_counts(pattern: Pattern, question: str) -> None:
    assert [why for shape in SHAPES for why in QUESTIONS[question](pattern, shape)] == []


@pytest.mark.parametrize(("pattern", "shape"), half_are_slow(EXAMPLES, SHAPES), ids=name_of)
def test_the_derived_answers_hold_as_well(pattern: Pattern, shape: SequenceShape) -> None:
    """A pattern that answers nothing by itself gets these."""
    assert Pattern.pairs(pattern, shape).attended == pattern.pairs(shape).attended
    for head in range(shape.num_heads):
        assert Pattern.covered(pattern, shape, head).tolist() == pattern.covered(shape, head).tolist()
        for key in range(0, shape.length, 13):
            derived = Pattern.rows_seeing(pattern, shape, head, key)
            assert derived.tolist() == pattern.rows_seeing(shape, head, key).tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (7, 5)])
def test_full_attention_has_density_one(causal: bool, window: tuple[int, int]) -> None:
    shapes = [SequenceShape(length, 4, 2, causal, window) for length in (61, 5)]
    assert DENSE.density_of(shapes) == 1
    assert [shape.visible_pairs for shape in shapes] == [Pattern.pairs(DENSE, shape).attended for shape in shapes]


@pytest.mark.parametrize("pattern", EXAMPLES, ids=lambda one: one.label())
def test_pictures_show_the_share_of_pairs(pattern: Pattern) -> None:
    shape = SHAPE
    shares = pattern.shares(shape, 61, 61)
    if shares is not None and shares.shape == (61, 61):
        assert np.array_equal(shares > 0, matrix(pattern, shape, 0) > 0)
    for picture in pattern.pictures(shape, 32):
        assert 0 < len(picture.cells) <= 32
        assert all(share is None or 0 <= share <= 1 for line in picture.cells for share in line)


@pytest.mark.parametrize("pattern", EXAMPLES[:-2], ids=lambda one: one.label())
def test_a_pattern_survives_json(pattern: Pattern) -> None:
    shape = {"seq_len": 61, "num_heads": 4, "num_kv_heads": 2, "causal": pattern.why_not_over(SHAPE) is None}
    workload = Workload(pattern=pattern, batch_size=1, head_dim=8, **shape)
    again = Workload.model_validate_json(workload.model_dump_json())
    assert (again, hash(again)) == (workload, hash(workload))
    assert type(again.pattern) is type(pattern)


def test_unknown_kinds_are_refused_and_never_dense() -> None:
    with pytest.raises(ValueError, match="unknown pattern 'nope'; known: "):
        read_pattern({"kind": "nope"})
    with pytest.raises(ConfigError, match="unknown pattern 'densee'; did you mean dense"):
        validated(WorkloadRequest, {"pattern": "densee"})
    with pytest.raises(ValueError, match="has no kind"):
        read_pattern({"segment_lengths": [8]})


def test_only_its_own_kind_is_taken_by_who_computes_one() -> None:
    workload = Workload(pattern=DENSE, batch_size=1, seq_len=8, num_heads=1, num_kv_heads=1, head_dim=8)
    assert DensePattern.of(workload) is DENSE
    with pytest.raises(ValueError, match="a dense pattern where only DilatedPattern"):
        pattern_type("dilated").of(workload)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PatternKind("x", "", "nowhere.at_all:X"), "cannot be loaded"),
        (PatternKind("x", "", "dilabench.patterns.dense:DENSE"), "is no subclass"),
        (PatternKind("x", "", "dilabench.patterns.dense:DensePattern"), "the field kind of .* is 'dense'"),
    ],
)
def test_what_is_no_pattern_is_not_let_in(kind: PatternKind, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        load(kind)


def test_fields_of_another_pattern_wait_for_it() -> None:
    asked = WorkloadRequest(pattern="dense", segment_lengths="2K,4K", block_size=64)
    assert asked.resolve("float32").pattern == DENSE
    dilated = asked.model_copy(update={"pattern": "dilated"}).resolve("float32").pattern
    assert dilated.segment_lengths == (2048, 4096)
    assert set(known_kinds()) >= {"dense", "dilated", "block_sparse"}
    assert list(registry.kinds_with("density")) == ["block_sparse"]
