"""How much device memory a call needs, by formula: what fits, before anything runs. No tensors.

Bytes follow from what the implementations keep alive at one time. Units of a formula are the tensors themselves: q and
out are [B, N, H, D], k and v [B, N, K, D], lse is [B, H, N] in float32 (float64 for float64). The largest kernel call
of a branch decides its workspace. Tests hold the formulas to measured peaks within 10 %; what has no formula is None,
never a guess. Constants that do not grow with the length (a kernel's buffers per thread, tile tables) are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dilabench.results import Case
from dilabench.spec import DTYPE_BYTES, DilatedPattern, Workload
from dilabench.work import head_branches, head_offset, rows_kept, tensor_bytes

FLOAT32_BYTES = 4
INDEX_BYTES = 8
LONGEST = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device at the fullest moment of a call, by what they are for; they add up to the peak.

    inputs: q, k, v (or embeddings), with dout unless the mode is forward. saved: what lives from forward to backward,
    inputs left out. workspace: everything else, results included. tables: index tensors that the pattern cache
    keeps between calls.
    """

    inputs_bytes: int
    parameters_bytes: int
    saved_bytes: int
    workspace_bytes: int
    tables_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What must fit, and what the engine's memory pass measures."""
        held = self.inputs_bytes + self.parameters_bytes + self.tables_bytes
        return held + self.saved_bytes + self.workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """What a dense kernel allocates inside one call beside its results, in units of the call's own rows.

    accumulators: float32 values per element of q in the backward pass. stats: float32 values per query row there.
    view_copies: of q, out and dout, how many it copies there when they are views. repeats: K/V heads are repeated to H.
    expands_gradients: dk and dv are made per query head and summed.
    """

    accumulators: int = 0
    stats: int = 0
    view_copies: int = 0
    repeats: bool = False
    expands_gradients: bool = False


# FlashAttention 2's dq_accum and softmax_d; its GQA backward makes dk and dv per query head and sums them.
FLASH2 = KernelMemory(accumulators=1, stats=1, view_copies=2, expands_gradients=True)
FLASH3 = KernelMemory(accumulators=1, stats=2)
ON_CUDA = {
    "sdpa-flash": FLASH2,
    "flash2": FLASH2,
    "xformers": FLASH2,
    "flash3": FLASH3,
    "flash4": FLASH3,
    "sdpa-cudnn": KernelMemory(accumulators=1, stats=1, view_copies=3),
    "sdpa-efficient": KernelMemory(accumulators=1, stats=1, view_copies=1, repeats=True),
    "dense-tiles": KernelMemory(stats=2),
}
ON_CPU = {"sdpa-flash": KernelMemory(repeats=True)}


@dataclass(frozen=True, slots=True)
class Call:
    """The largest kernel call of a branch: its share of all (query head, position) rows, and how it takes them.

    whole: it gives all of the output and becomes it. views: its rows are not contiguous. readers: query heads that read
    the same key rows. one_key: all of them read one head's keys, which needs no copies.
    """

    share: float
    whole: bool
    views: bool
    readers: int
    one_key: bool


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the tensors of a workload, and of one float32 per element and per row of q."""

    q: int
    kv: int
    lse: int
    q_float32: int
    rows_float32: int

    @classmethod
    def of(cls, workload: Workload) -> "_Sizes":
        sizes = tensor_bytes(workload)
        elements = sizes["q"] // DTYPE_BYTES[workload.dtype]
        rows = workload.tokens * workload.num_heads
        return cls(sizes["q"], sizes["k"], sizes["lse"], elements * FLOAT32_BYTES, rows * FLOAT32_BYTES)

    @property
    def gradients(self) -> int:
        """dq, dk and dv."""
        return self.q + 2 * self.kv


def plan_memory(case: Case, device: str) -> MemoryPlan | None:
    """The memory of a case on a kind of device ('cpu' or 'cuda'); None where there is no formula for it.

    Chunked queries and offloaded inputs count as their chunks do; a stream counts as one of its pieces.
    """
    workload, switched = case.workload, case.optimizations
    chunk = switched.query_chunk
    if not chunk or chunk >= workload.seq_len:
        return _plan(case, device, checkpointed=switched.gradient_checkpointing)
    piece = _plan(case.model_copy(update={"workload": workload.replace(seq_len=chunk)}), device)
    if piece is None:
        return None
    whole = _Sizes.of(workload)
    backward = workload.mode != "forward"
    inputs = whole.gradients + (whole.q if backward else 0)
    results = whole.q + (whole.gradients if backward else 0)
    if switched.offload_inputs:
        return piece
    # The piece's inputs are views of the whole ones, but a backward pass starts from a leaf of its own.
    workspace = results + piece.saved_bytes + piece.workspace_bytes
    return replace(piece, inputs_bytes=inputs, saved_bytes=0, workspace_bytes=workspace)


def longest_that_fits(case: Case, device: str, capacity_bytes: int) -> int | None:
    """The largest sequence length of the case whose plan fits into so many bytes; None without a formula, 0 if none.

    The batch size, heads and branches stay. It is a prediction: `extreme` finds the length by real runs.
    """
    if plan_memory(case, device) is None:
        return None

    def fits(length: int) -> bool:
        workload = case.workload.replace(seq_len=length)
        found = plan_memory(case.model_copy(update={"workload": workload}), device)
        return found is not None and found.peak_bytes <= capacity_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= LONGEST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _plan(case: Case, device: str, checkpointed: bool = False) -> MemoryPlan | None:
    workload = case.workload
    if workload.layout != "padded" or case.world_size > 1:
        return None
    name, embedded = case.implementation.removesuffix("-multihead"), case.implementation.endswith("-multihead")
    if name == "fused":
        name, kernel = (
            ("planned", ON_CUDA["dense-tiles"]) if _is_planned(workload) else ("strided", ON_CUDA["dense-tiles"])
        )
    else:
        found = (ON_CUDA if device == "cuda" else ON_CPU).get(case.backend or "")
        if found is None or name not in {"dense", "strided", "gather"}:
            return None
        kernel = found
    sizes = _Sizes.of(workload)
    calls = _calls(workload, gathered=name == "gather")
    passes = _Passes(sizes, kernel, calls, name, workload)
    forward, backward = passes.forward(), 0
    saved = 0
    if workload.mode != "forward":
        saved = passes.kept() + (0 if checkpointed else sizes.q + sizes.lse)
        backward = passes.backward() + (2 * sizes.q + sizes.lse if checkpointed else 0)
        forward = max(0, forward - saved)
    plan = MemoryPlan(
        inputs_bytes=sizes.gradients + (sizes.q if workload.mode != "forward" else 0),
        parameters_bytes=0,
        saved_bytes=saved,
        workspace_bytes=max(forward, backward),
        tables_bytes=passes.tables(),
    )
    return _embedded(plan, sizes, workload) if embedded else plan


def _embedded(core: MemoryPlan, sizes: _Sizes, workload: Workload) -> MemoryPlan:
    """The same inside a module: q, k and v are projected from embeddings, and the result is projected, too."""
    item = DTYPE_BYTES[workload.dtype]
    width, key_width = workload.num_heads * workload.head_dim, workload.num_kv_heads * workload.head_dim
    output_weights = width * width * item
    parameters = 2 * output_weights + 2 * width * key_width * item + 2 * (width + key_width) * item
    if workload.mode == "forward":
        # After the attention its out and the projected result stand beside q, k and v.
        workspace = sizes.gradients + max(core.workspace_bytes, 2 * sizes.q)
        return replace(core, inputs_bytes=sizes.q, parameters_bytes=parameters, workspace_bytes=workspace)
    # The result that the user holds, and the gradient of the attention's out.
    workspace = core.workspace_bytes + 2 * sizes.q + output_weights
    return replace(
        core,
        inputs_bytes=2 * sizes.q,
        parameters_bytes=parameters,
        saved_bytes=core.saved_bytes + sizes.gradients,
        workspace_bytes=workspace,
    )


@dataclass(frozen=True, slots=True)
class _Passes:
    """Bytes of the forward and backward pass beyond the inputs, at their fullest moment."""

    sizes: _Sizes
    kernel: KernelMemory
    calls: tuple[Call, ...]
    name: str
    workload: Workload

    def forward(self) -> int:
        """Out and lse, and the largest call beside them. A planned kernel writes into them directly."""
        sizes, result = self.sizes, self.sizes.q + self.sizes.lse
        if self.name == "planned":
            return result
        fullest = earlier = 0.0
        for index, call in enumerate(self.calls):
            own = call.share * result
            taken = call.share * ((sizes.gradients if self.name == "gather" else 0) + self._repeated(call))
            fullest = max(fullest, earlier + self._before(index, result) + own + taken)
            if not call.whole or self._detached:
                merging = call.share * (3 * sizes.lse + (result if self.name == "gather" and index else 0))
                fullest = max(fullest, earlier + result + own + merging)
            earlier += own if self._detached else 0.0
        return round(fullest)

    def backward(self) -> int:
        """dq, dk and dv, and the largest call's shares of them beside its copies and accumulators."""
        sizes, kernel = self.sizes, self.kernel
        if self.name == "planned":
            return sizes.gradients + 2 * sizes.rows_float32
        fullest = 0.0
        for index, call in enumerate(self.calls):
            inner = self._repeated(call) + self._expanded(call)
            inner += kernel.accumulators * sizes.q_float32 + kernel.stats * sizes.rows_float32
            copies = kernel.view_copies * sizes.q if call.views else 0
            if self.name == "gather":
                copies = sizes.gradients + 2 * sizes.q + sizes.lse
            before = self._before(index, sizes.gradients)
            fullest = max(fullest, before + call.share * (sizes.gradients + inner + copies))
            if not call.whole:
                fullest = max(fullest, sizes.gradients * (1 + call.share))
        return round(fullest)

    def _before(self, index: int, result: int) -> int:
        """Bytes of the whole result that are there before the fullest call of a branch begins.

        The first call of all finds none; a branch that `strided` cuts into parts finds that of its first part.
        """
        first = index == 0 and (self.name == "gather" or self.calls[0].whole)
        return 0 if first else result

    def kept(self) -> int:
        """Detached merge weights need every call's own out and lse in the backward pass."""
        if not self._detached:
            return 0
        return round(sum(fraction for fraction, _ in _fractions(self.workload)) * (self.sizes.q + self.sizes.lse))

    def tables(self) -> int:
        """Index tensors of `gather`, one of queries, keys and lse rows each."""
        if self.name != "gather":
            return 0
        fraction = sum(fraction for fraction, _ in _fractions(self.workload))
        rows = self.workload.seq_len * (2 * self.workload.num_heads + self.workload.num_kv_heads)
        return round(fraction * rows * INDEX_BYTES)

    @property
    def _detached(self) -> bool:
        pattern = self.workload.pattern
        return isinstance(pattern, DilatedPattern) and pattern.merge_grad == "detached" and self.name == "gather"

    def _repeated(self, call: Call) -> int:
        """K and V per query head, where the kernel cannot share them; a single K/V head is expanded in place."""
        return 2 * self.sizes.q if self.kernel.repeats and call.readers > 1 and not call.one_key else 0

    def _expanded(self, call: Call) -> int:
        """dk and dv per query head, before they are summed."""
        expands = self.kernel.repeats or self.kernel.expands_gradients
        return 2 * self.sizes.q if expands and call.readers > 1 else 0


def _calls(workload: Workload, gathered: bool) -> tuple[Call, ...]:
    """The largest call of every branch, first branch first, as the implementations cut them.

    `strided` takes a branch of several segments in min(r, H/r) calls, each at most half of the output unless it is all
    of it; `gather` takes a branch in one.
    """
    calls: list[Call] = []
    for index, (fraction, (segment, rate)) in enumerate(_fractions(workload)):
        count, rest = divmod(workload.seq_len, segment)
        whole = index == 0 and rate == 1 and rest == 0 and not _grouped(workload)
        # The short segment at the end is a call of its own.
        share = fraction * (1 - rest / workload.seq_len)
        if not gathered and not whole:
            one_segment = count * workload.batch_size == 1
            parts = 1 if one_segment else max(1, min(rate, -(-workload.num_heads // rate)))
            if rest and workload.batch_size > 1 and count > 1:
                parts *= min(workload.batch_size, count)
            share = _halved(share / parts)
        readers = _readers(workload, rate)
        one_key = readers == workload.num_heads if gathered else workload.num_kv_heads == 1
        calls.append(Call(share, whole, views=rate > 1, readers=readers, one_key=one_key))
    return tuple(calls)


def _readers(workload: Workload, rate: int) -> int:
    """Query heads that share key rows in a branch: a K/V head's group, but for those on other residues."""
    pattern, group = workload.pattern, workload.group_size
    spread = isinstance(pattern, DilatedPattern) and (pattern.offset, pattern.offset_by) == ("modulo", "head")
    return max(1, group // min(rate, group)) if spread else group


def _halved(share: float) -> float:
    while share > 0.5:
        share /= 2
    return share


def _fractions(workload: Workload) -> Iterator[tuple[float, tuple[int, int]]]:
    """Each branch by rising rate with the fraction of all (head, position) rows that it takes; dense is one branch."""
    length, pattern = workload.seq_len, workload.pattern
    if not isinstance(pattern, DilatedPattern):
        yield 1.0, (length, 1)
        return
    for segment, rate in sorted(pattern.branches, key=lambda branch: branch[1]):
        rows = 0
        for head in range(workload.num_heads):
            if (segment, rate) not in head_branches(pattern, head, workload.num_heads):
                continue
            offset = head_offset(pattern, head, rate, workload.num_heads, workload.num_kv_heads)
            count, rest = divmod(length, min(segment, length))
            rows += count * rows_kept(min(segment, length), rate, offset) + rows_kept(rest, rate, offset)
        yield rows / (length * workload.num_heads), (min(segment, length), rate)


def _grouped(workload: Workload) -> bool:
    return isinstance(workload.pattern, DilatedPattern) and workload.pattern.heads == "grouped"


def _is_planned(workload: Workload) -> bool:
    """Whether `fused` takes all branches in its one kernel: rates divide segments, no window, no grouped heads."""
    pattern = workload.pattern
    if not isinstance(pattern, DilatedPattern) or pattern.heads == "grouped" or workload.window != (-1, -1):
        return False
    rates = [rate for _, rate in pattern.branches]
    widest = max(rates)
    return all(widest % rate == 0 for rate in rates) and all(
        min(segment, workload.seq_len) % widest == 0 for segment, _ in pattern.branches
    )
