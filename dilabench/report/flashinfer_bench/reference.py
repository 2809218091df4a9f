"""The code of a definition: `run(q, k, v, qo_indptr, kv_indptr, sm_scale)`, as text that stands by itself.

Sequences follow each other along the first axis, and queries are the last of their sequence's keys, as in a prefill
over a cache. Unions of strided segments, dense attention among them, need nothing but torch; any other pattern is read
from dilabench, whose `counts` define it.
"""

from __future__ import annotations

from dataclasses import replace

from dilabench.patterns.pattern import StridedSegments
from dilabench.workload.spec import MAX_SEQ_LEN, Workload

OF_SEGMENTS = '''\
"""{label}."""

import math

import torch

# For each query head (segment length, rate, offset): a query and a key see each other where both lie in one segment,
# and on the residue `offset` of `rate` inside it; in several segments, as often. None: every query sees every key.
SEGMENTS = {segments}
CAUSAL, WINDOW = {causal}, {window}
ROWS = 512


def times_seen(head, rows, keys):
    """[rows, keys]: how often each key counts in the softmax of each row."""
    distance = rows[:, None] - keys
    seen = torch.ones_like(distance, dtype=torch.float32)
    if SEGMENTS is not None:
        seen = torch.zeros_like(seen)
        for length, rate, offset in SEGMENTS[head]:
            on_rows, on_keys = (x % length % rate == offset for x in (rows, keys))
            seen += (rows[:, None] // length == keys // length) & on_rows[:, None] & on_keys
    left, right = WINDOW[0], 0 if CAUSAL else WINDOW[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return seen.masked_fill(hidden, 0)


@torch.no_grad()
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    heads_per_kv_head = q.shape[1] // k.shape[1]
    queries, keys = (indptr.tolist() for indptr in (qo_indptr, kv_indptr))
    for start, stop, first_key, end in zip(queries, queries[1:], keys, keys[1:]):
        positions = torch.arange(end - first_key, device=q.device)
        cached = (end - first_key) - (stop - start)
        for head in range(q.shape[1]):
            k_head, v_head = (x[first_key:end, head // heads_per_kv_head].float() for x in (k, v))
            for chunk in torch.arange(stop - start, device=q.device).split(ROWS):
                scores = q[start + chunk, head].float() @ k_head.T * sm_scale
                scores += times_seen(head, chunk + cached, positions).log()
                total = scores.logsumexp(-1)
                weights = torch.exp(scores - total.masked_fill(total == -math.inf, 0)[:, None])
                output[start + chunk, head] = (weights @ v_head).to(q.dtype)
                # FlashInfer's log-sum-exp has base 2.
                lse[start + chunk, head] = total / math.log(2)
    return output, lse
'''

OF_ANY_PATTERN = '''\
"""{label}: the oracle of dilabench {version} (pip install dilabench), in float64."""

import torch

from dilabench.contracts import BuildContext
from dilabench.impls.reference import build
from dilabench.workload.spec import Workload

WORKLOAD = {workload}


@torch.no_grad()
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    output = torch.zeros_like(q)
    bounds = qo_indptr.tolist()
    assert bounds == kv_indptr.tolist(), "the pattern lies over as many queries as keys"
    for start, stop in zip(bounds, bounds[1:]):
        workload = Workload.model_validate({{**WORKLOAD, "seq_len": stop - start, "scale": float(sm_scale)}})
        attend = build(workload, BuildContext(device=q.device))
        output[start:stop] = attend(*(x[None, start:stop] for x in (q, k, v)))[0]
    return output
'''


def segments_of(workload: Workload) -> tuple[tuple[StridedSegments, ...], ...] | None:
    """The segments of each head, for sequences of any length; None for a pattern that is not such a union."""
    pattern, shapes = workload.pattern, workload.shapes
    if pattern.has_zero_keys:
        return None
    # Segments are clamped to the sequence: over the longest that there is, all are whole.
    longest = replace(shapes[0], length=MAX_SEQ_LEN)
    found = []
    for head in range(workload.num_heads):
        segments = pattern.strided_segments(longest, head)
        if segments is None or any(
            pattern.strided_segments(shape, head)
            != tuple(one._replace(segment_length=min(one.segment_length, shape.length)) for one in segments)
            for shape in dict.fromkeys(shapes)
        ):
            return None
        found.append(segments)
    return tuple(found)


def self_contained(workload: Workload, segments: tuple[tuple[StridedSegments, ...], ...]) -> str:
    """The code of a union of strided segments; returns output and lse."""
    plain = None if workload.is_dense else [[tuple(one) for one in head] for head in segments]
    return OF_SEGMENTS.format(
        label=_label(workload), segments=plain, causal=workload.causal, window=tuple(workload.window)
    )


def over_dilabench(workload: Workload, version: str) -> str:
    """The code of any pattern; returns output alone, for a sum of attentions has no lse."""
    fields = workload.model_dump(mode="json", exclude={"seq_len", "scale", "cu_seqlens", "layout", "mode"})
    return OF_ANY_PATTERN.format(label=_label(workload), version=version, workload={**fields, "batch_size": 1})


def _label(workload: Workload) -> str:
    masks = [workload.pattern.label(), *(["causal"] if workload.causal else [])]
    return ", ".join(masks).replace('"', "'").replace("\\", "/")
