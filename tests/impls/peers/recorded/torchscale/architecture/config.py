"""The fields of torchscale's configurations that its LongNet models read."""

import ast
from types import SimpleNamespace


def config(*, segment_length, dilated_ratio, **fields):
    """torchscale's are classes, which are given these two as text as well."""
    assert fields["flash_attention"]
    assert fields["no_output_layer"]
    usual = {"multiway": False, "xpos_rel_pos": False, "layernorm_eps": 1e-5}
    segments, rates = ast.literal_eval(segment_length), ast.literal_eval(dilated_ratio)
    return SimpleNamespace(segment_length=segments, dilated_ratio=rates, **usual, **fields)


EncoderConfig = DecoderConfig = config
