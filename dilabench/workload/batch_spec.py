"""vLLM's words for a batch of requests (its benchmarks/attention_benchmarks), as a packed workload: `2q2k_4q512`."""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

# (count)q(queries)(k)(s(sequence)(k)): count defaults to 1, the sequence to the queries, k is 1024.
_REQUESTS = re.compile(r"(?P<count>\d{1,6})?q(?P<queries>\d{1,9}k?)(?:s(?P<sequence>\d{1,9}k?))?")
# More would be a slip of the keyboard.
MOST_REQUESTS = 2**16
GIVEN_BY_IT = ("layout", "seq_len", "cu_seqlens", "batch_size")


def with_packed_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request once `batch` stands as those that it means, and bounds alone say how long they are.

    Raises ValueError where both `batch` and one of the others are given.
    """
    if "batch" in data:
        clash = sorted(data.keys() & set(GIVEN_BY_IT))
        if clash:
            raise ValueError(f"batch={data['batch']!r} says what {clash[0]} is; leave one of the two out")
        return {name: value for name, value in data.items() if name != "batch"} | packed_fields(data["batch"])
    bounds = data.get("cu_seqlens")
    if isinstance(bounds, str):
        bounds = bounds.strip("()[] ").split(",")
    if isinstance(bounds, list | tuple) and bounds and "seq_len" not in data:
        return {**data, "seq_len": bounds[-1]}
    return data


def packed_fields(text: Any) -> dict[str, Any]:
    """The fields of a packed workload whose sequences are the batch's requests, in their order.

    Raises ValueError for what is not in the grammar, and for requests with more keys than queries (decoding, extending
    a cache): a workload has as many of one as of the other.
    """
    lengths = list(_lengths(str(text)))
    return {
        "layout": "packed",
        "batch_size": 1,
        "seq_len": sum(lengths),
        "cu_seqlens": (0, *accumulate(lengths)),
    }


def _lengths(text: str) -> Iterator[int]:
    total = 0
    for part in text.strip().lower().split("_"):
        match = _REQUESTS.fullmatch(part)
        count, queries = (int(match["count"] or 1), _tokens(match["queries"])) if match else (0, 0)
        total += count
        if match is None or not count or not queries or total > MOST_REQUESTS:
            raise ValueError(
                f"batch {text!r}: {part!r} must be like 2q2k (two sequences of 2048 tokens), parts joined by '_', "
                f"up to {MOST_REQUESTS} sequences in all"
            )
        if match["sequence"] and _tokens(match["sequence"]) != queries:
            raise ValueError(
                f"batch {text!r}: {part!r} has {queries} queries over {match['sequence']} keys of a cache; a workload "
                "has as many queries as keys, so leave that part out (decoding is not measured here)"
            )
        yield from (queries,) * count


def _tokens(text: str) -> int:
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)
