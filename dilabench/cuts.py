"""Where a sequence can be cut so that no query sees a key on the other side. No tensors."""

from math import lcm

from dilabench.spec import DilatedPattern, Workload


def cut_length(workload: Workload) -> int | None:
    """The smallest number of tokens whose multiples are such cuts: the common multiple of all segment lengths.

    None where there is no cut: a dense or block-sparse pattern, packed sequences, or a segment as long as the sequence.
    """
    if not isinstance(workload.pattern, DilatedPattern) or workload.layout != "padded":
        return None
    length = lcm(*workload.pattern.segment_lengths)
    return length if length < workload.seq_len else None


def why_uncut(workload: Workload) -> str:
    """The reason for which `cut_length` is None, for a row that needs cuts."""
    if not isinstance(workload.pattern, DilatedPattern):
        return f"a {workload.pattern.kind} pattern has no cut: its queries see keys all along the sequence"
    if workload.layout != "padded":
        return "packed sequences are not cut"
    needed = lcm(*workload.pattern.segment_lengths)
    return (
        f"{workload.seq_len} tokens have no cut: segments {list(workload.pattern.segment_lengths)} end every {needed}"
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
