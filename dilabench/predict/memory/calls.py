"""The largest kernel call of every branch, as `strided` and `gather` cut a workload."""

from collections.abc import Iterator
from dataclasses import dataclass

from dilabench.patterns.dilated import rows_kept
from dilabench.predict.memory.sizes import Sizes, branches_under
from dilabench.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel call on q [batch, rows, heads, D] and k, v [batch, key_rows, kv_heads, D].

    share: of all (query head, position) rows of the workload, and `sizes` the bytes of its rows. rate: positions from
    one row to the next. masked: causal mask and window hide some of its pairs. whole: it gives all of the output and
    becomes it. views: its rows are not contiguous. readers: query heads that read the same key rows. one_key: all of
    them read one head's keys, which needs no copies.
    """

    share: float
    sizes: Sizes
    batch: int
    rows: int
    key_rows: int
    heads: int
    kv_heads: int
    rate: int
    masked: bool
    whole: bool
    views: bool
    readers: int
    one_key: bool


def largest_calls(workload: Workload, gathered: bool) -> tuple[Call, ...]:
    """One call per branch, first branch first, the largest of it; before them, the first call of all if it is smaller.

    `strided` takes a branch of several segments in min(r, H/r) calls, each at most half of the output unless it is all
    of it; `gather` takes a branch in one.
    """
    calls: list[Call] = []
    for index, (fraction, (segment, rate)) in enumerate(branch_fractions(workload)):
        count, rest = divmod(workload.seq_len, segment)
        whole = index == 0 and rate == 1 and rest == 0 and not workload.pattern.has_grouped_heads
        # The short segment at the end is a call of its own.
        share = fraction * (1 - rest / workload.seq_len)
        if gathered or whole:
            calls.append(_call(workload, share, 1, segment, rate, whole, gathered))
            continue
        one_segment = count * workload.batch_size == 1
        apart = 1 if one_segment else max(1, min(rate, -(-workload.num_heads // rate)))
        times = min(workload.batch_size, count) if rest and workload.batch_size > 1 and count > 1 else 1
        shares = _at_most_half(share / apart / times, 1 if one_segment else count)
        several = apart * times * len(shares) > 1
        if index == 0:
            calls.append(_call(workload, shares[0], apart, segment, rate, whole, gathered))
        if index or several:
            largest = max(shares if apart * times > 1 else shares[min(1, len(shares) - 1) :])
            calls.append(_call(workload, largest, apart, segment, rate, whole, gathered))
    return tuple(calls)


def _call(workload: Workload, share: float, apart: int, segment: int, rate: int, whole: bool, gathered: bool) -> Call:
    """A call on a share of all rows of a branch, whose heads are taken in so many calls."""
    readers = readers_of(workload, rate)
    rows = rows_kept(segment, rate, 0)
    pairs = max(1, round(share * workload.tokens * workload.num_heads / rows))
    heads = min(pairs, max(1, round(heads_in_branch(workload) / apart)))
    return Call(
        share=share,
        sizes=Sizes.of(workload).part(share),
        batch=max(1, round(pairs / heads)),
        rows=rows,
        key_rows=rows,
        heads=heads,
        kv_heads=max(1, heads // readers),
        rate=rate,
        masked=True,
        whole=whole,
        views=rate > 1 and not gathered,
        readers=readers,
        one_key=readers == workload.num_heads if gathered else workload.num_kv_heads == 1,
    )


def branch_fractions(workload: Workload) -> Iterator[tuple[float, tuple[int, int]]]:
    """Each branch by rising rate with the fraction of all (head, position) rows that it takes; dense is one branch."""
    length, pattern = workload.seq_len, branches_under(workload)
    if pattern is None:
        yield 1.0, (length, 1)
        return
    for segment, rate in sorted(pattern.branches, key=lambda branch: branch[1]):
        rows = 0
        for head in range(workload.num_heads):
            if (segment, rate) not in pattern.head_branches(head, workload.num_heads):
                continue
            offset = pattern.head_offset(head, rate, workload.num_heads, workload.num_kv_heads)
            count, rest = divmod(length, min(segment, length))
            rows += count * rows_kept(min(segment, length), rate, offset) + rows_kept(rest, rate, offset)
        yield rows / (length * workload.num_heads), (min(segment, length), rate)


def readers_of(workload: Workload, rate: int) -> int:
    """Query heads that share key rows in a branch: a K/V head's group, but for those on other residues."""
    pattern, group = branches_under(workload), workload.group_size
    spread = pattern is not None and (pattern.offset, pattern.offset_by) == ("modulo", "head")
    return max(1, group // min(rate, group)) if spread else group


def _at_most_half(share: float, count: int) -> list[float]:
    """A call in parts of at most half of all rows, cut in halves along its `count` segments, else batch or heads."""
    if share <= 0.5:
        return [share]
    front = count // 2 / count if count > 1 else 0.5
    first, rest = _at_most_half(share * front, count // 2), _at_most_half(share * (1 - front), count - count // 2)
    return [*first, *rest]


def heads_in_branch(workload: Workload) -> float:
    """Query heads that take part in a branch."""
    pattern = branches_under(workload)
    return workload.num_heads / len(pattern.branches) if pattern and pattern.has_grouped_heads else workload.num_heads
