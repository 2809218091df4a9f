"""The export for FlashInfer-Bench: held to its published schema, and its references to our oracle."""

import ast
import json
import math
import struct
from typing import Annotated, Literal

import numpy
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field

from dilabench.contracts import BuildContext
from dilabench.impls.reference import build
from dilabench.patterns.registry import pattern_type
from dilabench.report.flashinfer_bench.export import render
from dilabench.workload.spec import Workload

# flashinfer_bench/data/{definition,workload,trace}.py of April 2026, its rules in few words.
Text = Annotated[str, Field(min_length=1)]
Natural = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Axis(Strict):
    type: Literal["const", "var"]
    value: Natural | None = None
    description: str | None = None


class Tensor(Strict):
    shape: list[Text] | None
    dtype: Literal["float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool"]
    description: str | None = None


class Definition(Strict):
    name: Text
    op_type: Text
    axes: dict[Text, Axis]
    inputs: dict[Text, Tensor]
    outputs: dict[Text, Tensor]
    reference: Text
    tags: list[Text] = []
    description: str | None = None
    constraints: list[Text] = []


class Input(Strict):
    type: Literal["random", "scalar", "safetensors"]
    value: float | None = None
    path: Text | None = None
    tensor_key: Text | None = None


class Asked(Strict):
    axes: dict[str, Natural]
    inputs: dict[str, Input]
    uuid: Text


class Trace(Strict):
    definition: Text
    workload: Asked
    solution: None
    evaluation: None


def held_to_the_schema(root):
    """(definition, its traces) of every definition of a dataset, after its own and its cross-checks."""
    for path in sorted(root.glob("definitions/*/*.json")):
        one = Definition.model_validate_json(path.read_text())
        assert path.parent.name == one.op_type
        assert path.stem == one.name
        assert any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in ast.parse(one.reference).body)
        assert all(ast.parse(constraint, mode="eval") for constraint in one.constraints)
        assert not one.inputs.keys() & one.outputs.keys()
        tensors = [*one.inputs.values(), *one.outputs.values()]
        assert {axis for tensor in tensors for axis in tensor.shape or ()} <= one.axes.keys()
        assert all((axis.type == "const") == (axis.value is not None) for axis in one.axes.values())
        lines = (root / "workloads" / one.op_type / f"{one.name}.jsonl").read_text().splitlines()
        traces = [Trace.model_validate_json(line) for line in lines]
        for trace in traces:
            assert trace.definition == one.name
            assert trace.workload.inputs.keys() == one.inputs.keys()
            assert trace.workload.axes.keys() == {name for name, axis in one.axes.items() if axis.type == "var"}
        yield one, traces


def offsets(root, given):
    data = (root / given.path).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])[given.tensor_key]
    assert header["dtype"] == "I32"
    return torch.frombuffer(bytearray(data[8 + length :]), dtype=torch.int32).reshape(header["shape"])


DENSE = {"dtype": "bfloat16", "layout": "packed", "cu_seqlens": (0, 1, 60, 96), "head_dim": 8}
DILATED = {"kind": "dilated", "segment_lengths": (20, 48), "dilation_rates": (1, 3)}


def exported(workloads, make_row, make_record, folder):
    told = render(make_record([make_row("gather", **one) for one in workloads]), folder)
    return told, list(held_to_the_schema(folder / "flashinfer-bench"))


@pytest.mark.parametrize(
    "asked",
    [
        DENSE,
        {**DENSE, "dtype": "float32", "causal": False, "window": (7, 3), "num_heads": 4},
        {"pattern": DILATED, "num_heads": 4, "batch_size": 2, "dtype": "float32", "scale": 0.3},
        {"pattern": {**DILATED, "padding": "zero_key"}, "causal": False, "dtype": "float32"},
        {"pattern": {"kind": "window_sink", "sinks": 3, "window_size": 10}, "dtype": "float32"},
    ],
)
def test_a_definition_computes_what_the_oracle_does(asked, make_row, make_record, tmp_path):
    _, [(one, [trace])] = exported([asked], make_row, make_record, tmp_path)
    workload = Workload.model_validate(make_row("gather", **asked).case.workload.model_dump())
    made = torch.Generator().manual_seed(0)
    shape = (workload.batch_size, workload.seq_len)
    q, k, v = (
        torch.randn(*shape, heads, workload.head_dim, generator=made).to(getattr(torch, workload.dtype))
        for heads in (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)
    )
    given = trace.workload.inputs
    bounds = [offsets(tmp_path / "flashinfer-bench", given[name]) for name in ("qo_indptr", "kv_indptr")]
    assert trace.workload.axes == {
        "len_indptr": len(bounds[0]),
        "total_q": q[..., 0, 0].numel(),
        "total_kv": q[..., 0, 0].numel(),
    }
    namespace = {}
    exec(one.reference, namespace)
    found = namespace["run"](*(x.flatten(0, 1) for x in (q, k, v)), *bounds, given["sm_scale"].value)
    packed = workload.layout == "packed"
    reference = build(workload, BuildContext(device=torch.device("cpu")))
    out, lse = reference.with_lse(*(x[0] if packed else x for x in (q, k, v)))
    close = {"rtol": 1e-2, "atol": 1e-2} if workload.dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    if "lse" in one.outputs:
        found, base_2 = found
        ours = lse.T if packed else lse.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(base_2.double() * math.log(2), ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, out.view_as(found), **close)


def test_a_pattern_from_a_file_is_left_out(make_row, make_record, tmp_path):
    numpy.save(tmp_path / "mask.npy", numpy.ones((6, 6), dtype=bool))
    pattern = pattern_type("block_sparse").from_request({"mask_file": str(tmp_path / "mask.npy"), "block_size": 16})
    told, found = exported([{"pattern": pattern}], make_row, make_record, tmp_path)
    assert "its pattern is read from a file" in told
    assert found == []


def test_what_flashinfer_bench_knows_has_its_name_and_what_it_lacks_is_left_out(make_row, make_record, tmp_path):
    asked = [DENSE, {**DENSE, "mode": "both"}, {**DENSE, "cu_seqlens": (0, 96)}, {**DENSE, "dtype": "float64"}]
    told, [(one, traces)] = exported(asked, make_row, make_record, tmp_path)
    assert one.name == "gqa_ragged_prefill_causal_h2_kv2_d8"
    # The forward pass of two of them is one workload.
    assert len(traces) == len({trace.workload.uuid for trace in traces}) == 2
    assert told.startswith("1 definition and 2 workloads of run aaaa\nleft out 1x96 H2 D8 fp64 causal packed: ")
    assert told in (tmp_path / "flashinfer-bench" / "README.md").read_text()
