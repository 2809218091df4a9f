"""vLLM's notation for a batch of requests, as its benchmarks/attention_benchmarks read it: 2q2k_4q512, 64q1s32k.

A part is (count)q(queries)(k)(s(sequence)(k)): count defaults to 1, the sequence to the queries, k is 1024.
"""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

# The field of a request that holds it.
BATCH = "batch"
_REQUESTS = re.compile(r"(?P<count>\d{1,6})?q(?P<queries>\d{1,9}k?)(?:s(?P<sequence>\d{1,9}k?))?")
# A larger number would be a typing error.
MOST_REQUESTS = 2**16
PACKED_BY_BATCH = ("layout", "seq_len", "cu_seqlens", "batch_size")


class _Part(NamedTuple):
    text: str
    requests: int
    queries: int
    keys: int


def with_batch_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Replace `batch` in a request by the fields it stands for. Bounds alone determine layout and length.

    Raises ValueError if `batch` is given together with one of these fields.
    """
    if BATCH in data:
        fields = _fields(str(data[BATCH]))
        clash = sorted(data.keys() & {*PACKED_BY_BATCH, *fields})
        if clash:
            raise ValueError(f"batch={data[BATCH]!r} determines {clash[0]}; omit one of the two")
        return {name: value for name, value in data.items() if name != BATCH} | fields
    bounds = data.get("cu_seqlens")
    if isinstance(bounds, str):
        bounds = bounds.strip("()[] ").split(",")
    if isinstance(bounds, list | tuple) and bounds:
        return {"layout": "packed", "seq_len": bounds[-1], **data}
    return data


def _fields(text: str) -> dict[str, Any]:
    """The fields of a packed workload whose sequences are the batch's requests, in their order; if they have fewer
    queries than keys, of a padded one whose queries are the last rows.

    Raises ValueError for a text outside the grammar, and for requests over a cache in more than one part, because a
    workload has one number of queries and one of keys.
    """
    parts = list(_parts(text))
    cached = next((part for part in parts if part.queries != part.keys), None)
    if cached is None:
        lengths = [part.keys for part in parts for _ in range(part.requests)]
        bounds = (0, *accumulate(lengths))
        return {"layout": "packed", "batch_size": 1, "seq_len": bounds[-1], "cu_seqlens": bounds}
    if parts[1:]:
        raise ValueError(
            f"batch {text!r}: {cached.text!r} has {cached.queries} queries over {cached.keys} keys of a cache; such a "
            "workload has sequences of one size, so give that part alone"
        )
    return {"layout": "padded", "batch_size": cached.requests, "seq_len": cached.keys, "query_len": cached.queries}


def _parts(text: str) -> Iterator[_Part]:
    total = 0
    for part in text.strip().lower().split("_"):
        match = _REQUESTS.fullmatch(part)
        count, queries = (int(match["count"] or 1), _tokens(match["queries"])) if match else (0, 0)
        total += count
        if match is None or not count or not queries or total > MOST_REQUESTS:
            raise ValueError(
                f"batch {text!r}: {part!r} must be like 2q2k (two sequences of 2048 tokens), parts joined by '_', or "
                f"like 64q1s32k (64 queries, each over 32768 keys), up to {MOST_REQUESTS} sequences in all"
            )
        yield _Part(part, count, queries, _tokens(match["sequence"]) if match["sequence"] else queries)


def _tokens(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)
