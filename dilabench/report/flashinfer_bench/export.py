"""The reporter: files of a FlashInfer-Bench dataset, as read in flashinfer-bench at its head of April 2026.

A dataset is a folder with `definitions/<op type>/<name>.json`, `workloads/<op type>/<name>.jsonl` and tensors in
`blob/`. Everything has FlashInfer's ragged layout; packed and padded workloads differ in where sequences begin. Dense
causal attention in bfloat16 takes the name that FlashInfer-Bench itself gives it, so that its solutions apply.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from dilabench.atomic_file import write_bytes, write_text
from dilabench.errors import counted
from dilabench.record import RunRecord
from dilabench.report.flashinfer_bench.reference import over_dilabench, segments_of, self_contained
from dilabench.validation import content_hash
from dilabench.workload.spec import UNBOUNDED, Workload

FOLDER = "flashinfer-bench"
OP_TYPE = "gqa_ragged"
# What their schema has of our dtypes.
DTYPES = frozenset({"float32", "float16", "bfloat16"})
MOST_TOKENS = 2**31 - 1
# What a trace has besides, once a solution was measured.
UNSOLVED = {"solution": None, "evaluation": None}
README = """\
A dataset for FlashInfer-Bench (https://bench.flashinfer.ai), by `dilabench report RUN -f flashinfer-bench`:

    flashinfer-bench run --local .

{told}
"""


def render(record: RunRecord, folder: Path | None) -> str:
    """Write the dataset into `folder`/flashinfer-bench. Returns what was written and left out; its README has it, too.

    Workloads are those of the record's rows, each once and as its forward pass: the benchmark is one of inference.
    """
    if folder is None:
        raise ValueError("this reporter writes files and was given no folder")
    root = folder / FOLDER
    definitions: dict[str, dict[str, Any]] = {}
    workloads: dict[str, dict[str, dict[str, Any]]] = {}
    left_out: list[str] = []
    for workload in dict.fromkeys(row.case.workload.replace(mode="forward") for row in record.rows):
        if reason := _reason_against(workload):
            left_out.append(f"left out {workload.label()}: {reason}")
            continue
        made = definition(workload, record.tool_version)
        name = made["name"]
        definitions[name] = made
        asked = workload_of(workload, name)
        workloads.setdefault(name, {})[asked["uuid"]] = asked
        write_bytes(root / _offsets_path(name, asked["uuid"]), _safetensors(_offsets(workload)))
    for name, made in definitions.items():
        write_text(root / "definitions" / OP_TYPE / f"{name}.json", json.dumps(made, indent=2) + "\n")
        lines = [json.dumps({"definition": name, "workload": one, **UNSOLVED}) for one in workloads[name].values()]
        write_text(root / "workloads" / OP_TYPE / f"{name}.jsonl", "\n".join(lines) + "\n")
    counts = counted(len(definitions), "definition"), counted(sum(map(len, workloads.values())), "workload")
    told = "\n".join([f"{' and '.join(counts)} of run {record.run_id}", *left_out])
    write_text(root / "README.md", README.format(told=told))
    return told


def definition(workload: Workload, version: str) -> dict[str, Any]:
    """The definition of a workload's function for its heads and dtype; lengths are variable axes."""
    segments = segments_of(workload)
    reference = over_dilabench(workload, version) if segments is None else self_contained(workload, segments)
    heads = {"num_qo_heads": workload.num_heads, "num_kv_heads": workload.num_kv_heads, "head_dim": workload.head_dim}
    queries, keys = ["total_q", "num_qo_heads", "head_dim"], ["total_kv", "num_kv_heads", "head_dim"]
    outputs = {"output": _tensor(queries, workload.dtype)}
    if segments is not None:
        outputs["lse"] = _tensor(queries[:2], "float32", "The 2-based log-sum-exp of attention logits.")
    return {
        "name": _name(workload, reference),
        "description": f"{workload.pattern.label()}{', causal' if workload.causal else ''}, over ragged sequences.",
        "op_type": OP_TYPE,
        "tags": ["source:dilabench", f"pattern:{workload.pattern.kind}"],
        "axes": {
            **{name: {"type": "const", "value": value} for name, value in heads.items()},
            "len_indptr": {"type": "var", "description": "Number of sequences + 1."},
            "total_q": {"type": "var", "description": "Query tokens of all sequences."},
            "total_kv": {"type": "var", "description": "Key/value tokens of all sequences."},
        },
        "constraints": ["total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"],
        "inputs": {
            "q": _tensor(queries, workload.dtype),
            "k": _tensor(keys, workload.dtype),
            "v": _tensor(keys, workload.dtype),
            "qo_indptr": _tensor(["len_indptr"], "int32", "Where each sequence's queries begin, and their end."),
            "kv_indptr": _tensor(["len_indptr"], "int32", "Where each sequence's keys begin, and their end."),
            "sm_scale": _tensor(None, "float32", "Softmax scale."),
        },
        "outputs": outputs,
        "reference": reference,
    }


def workload_of(workload: Workload, name: str) -> dict[str, Any]:
    """The workload for the definition of that name; its uuid follows from its content."""
    offsets = _offsets(workload)
    axes = {"len_indptr": len(offsets), "total_q": workload.tokens, "total_kv": workload.tokens}
    content = content_hash({"definition": name, "offsets": offsets, "scale": workload.softmax_scale})
    identity = str(uuid.uuid5(uuid.NAMESPACE_OID, content))
    stored = {"type": "safetensors", "path": _offsets_path(name, identity), "tensor_key": "indptr"}
    return {
        "uuid": identity,
        "axes": axes,
        "inputs": {
            **{tensor: {"type": "random"} for tensor in ("q", "k", "v")},
            "qo_indptr": stored,
            "kv_indptr": stored,
            "sm_scale": {"type": "scalar", "value": workload.softmax_scale},
        },
    }


def _reason_against(workload: Workload) -> str | None:
    if workload.dtype not in DTYPES:
        return f"FlashInfer-Bench has no {workload.dtype}"
    if workload.pattern.files():
        return "its pattern is read from a file, and a definition stands by itself"
    if workload.tokens > MOST_TOKENS:
        return f"{workload.tokens} tokens are more than offsets of 32 bits count"
    return None


def _name(workload: Workload, reference: str) -> str:
    shape = f"h{workload.num_heads}_kv{workload.num_kv_heads}_d{workload.head_dim}"
    if workload.is_dense and workload.causal and workload.window == UNBOUNDED and workload.dtype == "bfloat16":
        return f"{OP_TYPE}_prefill_causal_{shape}"
    return f"{OP_TYPE}_{workload.pattern.kind}_{shape}_{workload.dtype}_{content_hash(reference)[:8]}"


def _tensor(shape: Sequence[str] | None, dtype: str, description: str | None = None) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, **({"description": description} if description else {})}


def _offsets(workload: Workload) -> tuple[int, ...]:
    """Where the sequences begin, one after the other, and where the last one ends."""
    lengths = [end - start for start, end in workload.sequences] * workload.batch_size
    return 0, *accumulate(lengths)


def _offsets_path(name: str, identity: str) -> str:
    return f"blob/workloads/{OP_TYPE}/{name}/{name}_{identity}.safetensors"


def _safetensors(offsets: Iterable[int]) -> bytes:
    """One int32 tensor `indptr` in the safetensors format: the header's length, the header, the data."""
    values = list(offsets)
    data = struct.pack(f"<{len(values)}i", *values)
    header = json.dumps({"indptr": {"dtype": "I32", "shape": [len(values)], "data_offsets": [0, len(data)]}})
    padded = header + " " * (-len(header) % 8)
    return struct.pack("<Q", len(padded)) + padded.encode() + data
