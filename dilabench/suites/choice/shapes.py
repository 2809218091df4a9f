"""Random workloads, each determined by the seed and its number, so that any of them can be drawn again."""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dilabench.errors import ConfigError
from dilabench.machine import Machine, Size
from dilabench.plugins.catalogue import Catalogue
from dilabench.suites.planner import workload_request
from dilabench.workload.spec import WorkloadRequest, flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The ranges from which shapes are drawn on a kind of device. No call has more tokens than the longest sequence;
    `most_flops`: about the FLOPs of the slowest dense kernel in one second.
    """

    lengths: tuple[int, int]
    num_heads: tuple[int, ...]
    dtypes: tuple[str, ...]
    most_flops: float


RANGES: Mapping[Size, Range] = {
    "small": Range(lengths=(512, 8192), num_heads=(1, 2, 4), dtypes=("float32", "bfloat16"), most_flops=2e10),
    "large": Range(
        lengths=(2048, 100_000),
        num_heads=(4, 8, 12, 16),
        dtypes=("bfloat16", "float16", "float32"),
        most_flops=2e13,
    ),
}
HEAD_DIMS = (24, 32, 48, 64, 80, 96, 128, 192, 256)
MOST_BATCH, MOST_BRANCHES = 4, 6
SHORTEST_SEGMENT, SHORTEST_WINDOW = 128, 64
SHARE_DENSE, SHARE_WINDOWED, SHARE_GROUPED, SHARE_BLOCKED, SHARE_GQA = 0.1, 0.2, 0.2, 0.2, 0.4
MOST_DRAWS = 1000


def shape(catalogue: Catalogue, machine: Machine, seed: int, number: int, fixed: Mapping[str, Any]) -> WorkloadRequest:
    """The workload of a number, counted from 1. Fields in `fixed` are as given; the others are drawn.

    Impossible or too expensive shapes are drawn again. Raises ConfigError if the fixed fields allow no other ones.
    """
    drawn = random.Random(f"{seed}:{number}")
    why, limits = "", RANGES[machine.facts.size]
    for _ in range(MOST_DRAWS):
        try:
            asked = workload_request(catalogue, None, {**_fields(drawn, limits, fixed), **fixed})
            workload = asked.resolve(machine.auto_dtype)
        except ConfigError as error:
            why = str(error)
            continue
        if flops(workload) <= limits.most_flops:
            return asked
        why = f"{workload.label()} takes {flops(workload):.2g} FLOPs, more than {limits.most_flops:.2g}"
    raise ConfigError(f"no shape can be drawn with {', '.join(fixed)} as given: {why}; leave some of them out")


def _fields(drawn: random.Random, limits: Range, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """All fields, fixed ones included, so that dependent fields fit the fixed values."""
    shortest, longest = limits.lengths
    seq_len = fixed.get("seq_len", _log_uniform(drawn, shortest, longest))
    num_heads = fixed.get("num_heads", drawn.choice(limits.num_heads))
    divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    causal = fixed.get("causal", drawn.random() < 0.5)
    fields = {
        "seq_len": seq_len,
        "batch_size": drawn.randint(1, max(1, min(MOST_BATCH, longest // seq_len))),
        "num_heads": num_heads,
        "num_kv_heads": drawn.choice(divisors) if drawn.random() < SHARE_GQA else num_heads,
        "head_dim": drawn.choice(HEAD_DIMS),
        "dtype": drawn.choice(limits.dtypes),
        "causal": causal,
        "mode": drawn.choice(("forward", "both")),
        "heads": "grouped" if drawn.random() < SHARE_GROUPED else "all",
        "offset": "blocked" if drawn.random() < SHARE_BLOCKED else "modulo",
    }
    if fields["num_kv_heads"] != num_heads:
        fields["offset_by"] = drawn.choice(("head", "kv_head"))
    if drawn.random() < SHARE_WINDOWED:
        reach = _log_uniform(drawn, SHORTEST_WINDOW, seq_len // 2)
        fields["window"] = (reach, 0 if causal else reach)
    segments, rates = zip(*_branches(drawn, seq_len), strict=True)
    return {**fields, "segment_lengths": segments, "dilation_rates": rates}


def _branches(drawn: random.Random, seq_len: int) -> Iterator[tuple[int, int]]:
    """Segments that nest in powers of two, or grow irregularly; rates that double, or grow irregularly (odd ones too).

    The last is the only one that may be longer than the sequence.
    """
    if drawn.random() < SHARE_DENSE:
        yield seq_len, 1
        return
    nested, doubling = drawn.random() < 0.5, drawn.random() < 0.5
    segment = _log_uniform(drawn, SHORTEST_SEGMENT, seq_len)
    if nested:
        segment = 1 << (segment.bit_length() - 1)
    rate = drawn.choice((1, 1, 1, 1, 2, 3))
    for _ in range(drawn.randint(1, MOST_BRANCHES)):
        yield segment, rate
        if segment >= seq_len:
            return
        segment = segment * drawn.choice((2, 4)) if nested else math.ceil(segment * drawn.uniform(1.2, 5.0))
        rate = 2 * rate if doubling else rate + drawn.randint(1, max(2, rate))


def _log_uniform(drawn: random.Random, low: int, high: int) -> int:
    return round(math.exp(drawn.uniform(math.log(low), math.log(max(low, high)))))
