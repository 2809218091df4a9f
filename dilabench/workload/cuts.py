"""Cuts of a sequence: positions at which no query sees a key on the other side. No tensors."""

from itertools import pairwise

from dilabench.workload.spec import Workload


def cut_length(workload: Workload) -> int | None:
    """Return the smallest number of tokens whose multiples are cuts.

    None if there is no cut: the pattern has none, sequences are packed, the first one is beyond the end, or the queries
    are fewer than the keys.
    """
    length = workload.pattern.cut_length if workload.query_len is None else None
    return length if length is not None and workload.layout == "padded" and length < workload.seq_len else None


def uncut_step(workload: Workload, ranks: int) -> int:
    """Return a step: at its multiples, lengths cut into one equal part per rank cut no segment, if there are cuts."""
    return (workload.pattern.cut_length or 1) * ranks


def why_uncut(workload: Workload) -> str:
    """Return why `cut_length` is None, for a row that needs cuts."""
    pattern = workload.pattern
    if workload.query_len is not None:
        return f"{workload.queries_label()} of {workload.seq_len} keys: only sequences with every query are cut"
    if pattern.has_zero_keys:
        return f"{pattern.label()} has no cut: a separate part would attend other zero keys"
    if pattern.cut_length is None:
        return f"a {pattern.kind} pattern has no cut: its queries see keys all along the sequence"
    if workload.layout != "padded":
        return "packed sequences are not cut"
    return f"{workload.seq_len} tokens have no cut: cuts of {pattern.label()} are at multiples of {pattern.cut_length}"


def cut_apart(workload: Workload, parts: int) -> tuple[int, ...]:
    """Return the lengths of successive parts, as equal as cuts allow, that see no keys of each other.

    Raises ValueError when the sequence has fewer such parts.
    """
    if parts == 1:
        return (workload.seq_len,)
    if reason := why_not_apart(workload, parts):
        raise ValueError(reason)
    cut = cut_length(workload) or workload.seq_len
    pieces = -(-workload.seq_len // cut)
    edges = [min(workload.seq_len, pieces * part // parts * cut) for part in range(parts + 1)]
    return tuple(stop - start for start, stop in pairwise(edges))


def why_not_apart(workload: Workload, parts: int) -> str | None:
    """Return why there are no such parts, or None if there are."""
    cut = cut_length(workload)
    if cut is None:
        return f"{parts} parts that need nothing of each other: {why_uncut(workload)}"
    pieces = -(-workload.seq_len // cut)
    if pieces >= parts:
        return None
    return (
        f"{workload.seq_len} tokens cannot be cut into {parts} parts that need nothing of each other, only into "
        f"{pieces}: segments end together every {cut}; ring-allgather sends what crosses"
    )


def cut_into(workload: Workload, tokens: int) -> tuple[int, ...]:
    """Lengths of the pieces of at most `tokens` tokens, all but the last of that length.

    Raises ValueError when a piece would end inside a segment.
    """
    cut = cut_length(workload)
    if tokens >= workload.seq_len:
        return (workload.seq_len,)
    if cut is None or tokens % cut:
        raise ValueError(
            f"pieces of {tokens} tokens: {why_uncut(workload) if cut is None else f'cuts lie every {cut}'}"
        )
    whole, rest = divmod(workload.seq_len, tokens)
    return (*[tokens] * whole, *([rest] if rest else []))
