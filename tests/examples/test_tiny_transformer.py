"""The example of docs/how-to/use-in-a-model.md trains."""

import runpy
from pathlib import Path

import pytest


@pytest.mark.slow
def test_attention_learns_to_copy() -> None:
    example = runpy.run_path(str(Path(__file__).with_name("tiny_transformer.py")))
    losses = example["train"]()
    # Without looking back, nothing beats the entropy of a uniform draw from 8 tokens: 2.08.
    assert losses[-1] < 1.2, losses[-1]
