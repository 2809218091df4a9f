"""Attention over the ranks of a process group: each owns some tokens of a sequence, which attend to all tokens.

    shards = sequence_shards(seq_len)
    x = shards.take(embeddings)                      # this rank's tokens
    out = ring_attention(q, k, v, shards)            # of projections of x

Bounds, plans and the workload that ranks agreed on are made once for each shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from dilabench.attention import operands
from dilabench.choice.computation import backend_of, check_backend, machine_of
from dilabench.choice.descriptors import load_target
from dilabench.choice.over_ranks import fastest_expected
from dilabench.choice.rules import by_priority
from dilabench.choice.ways import Way, Ways, own_ways
from dilabench.contracts import Attend, BuildContext
from dilabench.distributed.model import Order
from dilabench.distributed.row_assignment import balanced_rows
from dilabench.distributed.sharding import Shards, contiguous, shards_of, zigzag
from dilabench.distributed.world import World
from dilabench.errors import ConfigError
from dilabench.impls.call import Call, OwnBackend, PatternFields, fields_of, name_of_function, pattern_of
from dilabench.impls.multihead import check_sizes
from dilabench.impls.no_pairs import SHAPES_ONLY, ShapesOnly
from dilabench.impls.one_operator import as_one_operator, eager, is_plain_eager_call, new_number, register
from dilabench.impls.operator_rules import refuse_forward_mode
from dilabench.impls.ring.schedule.function import ShardedAttention, request_for
from dilabench.patterns.answers import reach_of
from dilabench.patterns.dense import DENSE
from dilabench.patterns.pattern import Pattern
from dilabench.validation import validated
from dilabench.workload.spec import AUTO, UNBOUNDED, Window, Workload, attended_pairs

# Kept for each `SequenceShards`, of some 20 kilobytes each.
MOST_FUNCTIONS = 256


class SequenceShards:
    """The tokens that each rank of a group owns, and the cached functions that attend over them.

    `copy.deepcopy` (of a model, say) returns the same object, because it belongs to a process group. It cannot be
    pickled.
    """

    def __init__(self, world: World, bounds: tuple[int, ...], packed: bool, order: Order, shards: Shards) -> None:
        self.world, self.bounds, self.packed, self.order, self.shards = world, bounds, packed, order, shards
        self._functions: dict[Any, ShardedAttention | ShapesOnly] = {}
        self._worlds: dict[torch.device, World] = {}
        self._number = new_number()
        register(self._number, self)

    @property
    def seq_len(self) -> int:
        """Tokens of all ranks together."""
        return self.bounds[-1]

    @property
    def rows(self) -> int:
        """Tokens of this rank."""
        return self.shards.rows[self.world.rank]

    @property
    def positions(self) -> Tensor:
        """[rows] int64 on the CPU: the position in its sequence of each token of this rank, for encodings."""
        places = torch.cat(
            [torch.arange(0, device="cpu"), *(torch.arange(b - a, device="cpu") for a, b in pairwise(self.bounds))]
        )
        return self.shards.take(places, self.world.rank, dim=0)

    def _computation_for(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *_read: Tensor | None,
    ) -> ShardedAttention | ShapesOnly:
        """The computation for tensors like these, made once for each shape and kind. Raises ValueError."""
        kinds = (query.shape, key.shape, value.shape), (query.dtype, key.dtype, value.dtype)
        key_of_call = (*kinds, query.device, key.device, value.device, call)
        known = self._functions.get(key_of_call)
        if known is None:
            operands.check_kinds((x.dtype, x.device) for x in (query, key, value))
            if query.is_meta:
                raise ValueError("query, key and value are on meta: ranks exchange data; give tensors that have some")
            operands.check_call(call)
            try:
                workload = _workload(query, key, self, call)
                if self.seq_len and query.shape[0 if not self.packed else -1]:
                    known = self._new(workload, query.device, call)
                elif query.shape[-3] != self.rows or key.shape[-3] != self.rows or value.shape != key.shape:
                    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
                    raise ValueError(f"{shapes} must have this rank's {self.rows} tokens; cut them with `shards.take`")
                else:
                    # No rank has a token.
                    check_backend(call.backend)
                    if call.algorithm != AUTO:
                        own_ways(over_ranks=True).implementations.get(call.algorithm)
                    known = SHAPES_ONLY
            except ConfigError as error:
                raise ValueError(str(error)) from None
            if len(self._functions) >= MOST_FUNCTIONS:
                # The oldest: all ranks make the same calls, so all of them drop the same one.
                del self._functions[next(iter(self._functions))]
            self._functions[key_of_call] = known
        return known

    def _new(self, workload: Workload, device: torch.device, call: Call) -> ShardedAttention:
        """The computation of a call that is new to this rank; ranks exchange facts to make it."""
        request = request_for(workload, self.shards)
        new = {"algorithm": call.algorithm, "pass": "the first, which is new"}
        with self.world.numbered(request.with_fields(new)):
            function, algorithm = _function(workload, self, device, call)
        function.ask_for(request.with_fields({"algorithm": algorithm}))
        return function

    def _pairs_for(self, query: torch.Size, key: torch.Size, call: Call, _indices: torch.Size | None) -> int:
        """This rank's pairs, if all ranks have equally many."""
        if not self.seq_len or 0 in query:
            return 0
        of_query, of_key = (torch.empty(shape, device="meta", dtype=torch.float32) for shape in (query, key))
        return attended_pairs(_workload(of_query, of_key, self, call)) // self.world.size

    def summed(self, x: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, for gradients of sinks in compiled graphs."""
        return self._world_on(x.device).summed(x)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole tensor; `dim` is the axis of tokens. Raises ValueError for another length."""
        self._check_axis(x, dim, self.seq_len, "the tokens of all ranks")
        return self.shards.take(x, self.world.rank, dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole tensor of every rank's tokens, on every rank; it carries no gradient. All ranks call it.

        `dim` is the axis of tokens. Raises ValueError for another length than `rows`.
        """
        self._check_axis(x, dim, self.rows, "the tokens of this rank")
        dim %= x.ndim
        lead, rest = x.shape[:dim], x.shape[dim + 1 :]
        sizes = [(*lead, rows, *rest) for rows in self.shards.rows]
        return self.shards.join(self._world_on(x.device).all_gather(x.detach(), sizes), dim)

    def transport(self, device: torch.device) -> str:
        """The transport of messages between tensors on a device: 'copy engines', 'gloo', or 'nccl (reason)'.

        All ranks call it.
        """
        return self._world_on(device).transport

    def _world_on(self, device: torch.device) -> World:
        world = self._worlds.get(device)
        if world is None:
            world = self._worlds[device] = self.world.on(device)
        return world

    @staticmethod
    def _check_axis(x: Tensor, dim: int, length: int, what: str) -> None:
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != length:
            raise ValueError(
                f"x {tuple(x.shape)} with dim={dim}: this axis must have {length} entries, {what}; give the axis of "
                "tokens as dim"
            )

    def __copy__(self) -> SequenceShards:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> SequenceShards:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "SequenceShards belong to a process group of this process and cannot be pickled; call sequence_shards in "
            "each process"
        )

    def __repr__(self) -> str:
        what = f"{len(self.bounds) - 1} packed sequences, " if self.packed else ""
        return f"SequenceShards({what}{self.seq_len} tokens, {self.order}, rank {self.world.rank} of {self.world.size})"


def sequence_shards(
    seq_len: int | None = None,
    *,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    order: Order = "zigzag",
    window: Window = UNBOUNDED,
    group: dist.ProcessGroup | DeviceMesh | None = None,
) -> SequenceShards:
    """The cut of `seq_len` tokens, or of packed sequences (`cu_seqlens`, ascending from 0), over the ranks of a group.
    Either may have no tokens; equal bounds are empty sequences.

    All ranks of the group call it. `order`: 'zigzag' gives rank r of P the chunks r and 2P-1-r of 2P, which balances
    causal attention; 'contiguous' gives it the r-th part, as dilated attention wants; 'balanced' assigns chunks of
    packed sequences by what their tokens see in causal attention with `window`, as many tokens to each rank. Nothing is
    padded: parts differ where lengths do not divide. `group`: by default all ranks; or a DeviceMesh of one dimension.

    Raises ValueError for a negative length, bounds that fall or an unknown order, RuntimeError without a process group.
    """
    if (seq_len is None) == (cu_seqlens is None):
        raise ValueError(f"seq_len {seq_len} and cu_seqlens {cu_seqlens}: give one of them")
    if cu_seqlens is None:
        check_sizes(0, seq_len=seq_len)
    bounds = (0, seq_len or 0) if cu_seqlens is None else operands.bounds(cu_seqlens)
    bounds = operands.without_empty(bounds, bounds[-1])
    if order not in get_args(Order):
        raise ValueError(f"order {order!r} must be one of {', '.join(get_args(Order))}")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}: name one, mesh['cp']")
        group = group.get_group()
    return shards_in_world(World.of_group(group), bounds, order, window, packed=cu_seqlens is not None)


def shards_in_world(
    world: World, bounds: tuple[int, ...], order: Order, window: Window, *, packed: bool
) -> SequenceShards:
    """`sequence_shards` of ranks that have met."""
    return SequenceShards(world, bounds, packed, order, _cut(tuple(pairwise(bounds)), order, window, world.size))


def _cut(sequences: tuple[tuple[int, int], ...], order: Order, window: Window, size: int) -> Shards:
    if order == "balanced" and sequences:
        return shards_of(balanced_rows(sequences, reach_of(window, causal=True), size))
    return (zigzag if order == "zigzag" else contiguous)(sequences, size)


def _branches(
    segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (
        operands.integers("segment_lengths", () if segment_lengths is None else segment_lengths),
        operands.integers("dilation_rates", () if dilation_rates is None else dilation_rates),
    )


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: SequenceShards,
    *,
    causal: bool = True,
    window: Window = UNBOUNDED,
    scale: float | None = None,
    segment_lengths: Sequence[int] | None = None,
    dilation_rates: Sequence[int] | None = None,
    sink: Tensor | None = None,
    algorithm: str = AUTO,
    backend: str | Attend = AUTO,
) -> Tensor:
    """This rank's rows of attention over all ranks: out and query [B, N_local, H, D], key, value [B, N_local, K, D].

    These are this rank's tokens; packed: [T_local, H, D]. With `segment_lengths` and `dilation_rates` it is dilated
    attention. All ranks call it, forward and backward, in the same order. `algorithm` and `backend` are names of
    `dilabench list`, or `backend` is a function of dense attention as for `dilated_attention`. 'auto' is the algorithm
    that should be the fastest of those that take tokens in the order of `shards` (`choice.over_ranks`). `sink`: [H],
    the logits of a key of value 0 that every row sees, the same on all ranks; its gradient is summed over them. The
    gradients are exact. Under torch.compile forward and backward are one operator each, with all messages inside.

    Raises ValueError for shapes or names that do not fit, and RuntimeError, after the timeout of the group at the
    latest, when a rank is gone. Raises RanksDisagreeError when ranks make different calls, new or known ones; the group
    is then of no more use. With gloo they raise it in that call, or the next one with messages. On a GPU they raise it
    at their next new call, or at the first use of the group after about a second, and no result since the last call
    that agreed may be read; with NCCL a GPU that waits is ended by the timeout.
    """
    operands.check_are_tensors(query=query, key=key, value=value)
    if sink is not None:
        operands.check_is_tensor(sink)
    if forward_ad._current_level >= 0:
        refuse_forward_mode(query, key, value, *(() if sink is None else (sink,)))
    if torch._C._is_any_autocast_enabled():
        query, key, value = operands.as_autocast(query, key, value)
    pattern: Pattern | PatternFields = DENSE
    if segment_lengths is not None or dilation_rates is not None:
        branches = _branches(segment_lengths, dilation_rates)
        if any(branches):
            pattern = pattern_of("dilated", **dict(zip(("segment_lengths", "dilation_rates"), branches, strict=True)))
    if type(causal) is not bool:
        operands.check_options({"causal": causal})
        causal = bool(causal)
    sides = window if type(window) is tuple else operands.integers("window", window)
    own: Any = backend
    if not isinstance(backend, str):
        operands.check_options({"backend": backend})
        own = name_of_function(backend) if torch.compiler.is_compiling() else OwnBackend(backend)
    if isinstance(pattern, Pattern):
        call = Call(pattern, causal, sides, scale, backend=own, algorithm=algorithm)  # type: ignore[arg-type]
        if is_plain_eager_call(query, key, value):
            try:
                computation = shards._computation_for(query, key, value, call)
            except TypeError:
                operands.refuse_types(call._asdict())
                raise
            if sink is not None:
                operands.check_sink(sink, query[None] if shards.packed else query, pattern)
            return eager(computation, query.contiguous(), key.contiguous(), value.contiguous(), sink)[0]
    fields = fields_of(pattern) if isinstance(pattern, Pattern) else pattern
    assert fields is not None, "dilated and dense patterns have fields"
    call = Call(DENSE, causal, sides, scale, backend=own, algorithm=algorithm)  # type: ignore[arg-type]
    operands.refuse_types(call._asdict())
    if sink is not None:
        operands.check_sink(sink, query[None] if shards.packed else query, None)
    # The backward pass reads these copies; copies made inside would be repeated there.
    tensors = query.contiguous(), key.contiguous(), value.contiguous()
    return as_one_operator(shards._number, *tensors, call, fields, sink)[0]


def _workload(query: Tensor, key: Tensor, shards: SequenceShards, call: Call) -> Workload:
    """The workload that all ranks compute together."""
    if query.ndim != (3 if shards.packed else 4):
        wanted = "[T_local, H, D], for sequences are packed" if shards.packed else "[B, N_local, H, D]"
        raise ValueError(f"query {tuple(query.shape)} must be {wanted}")
    if key.ndim != query.ndim:
        raise ValueError(f"key {tuple(key.shape)} must have the axes of query {tuple(query.shape)}")
    operands.check_heads(query.shape[-2], key.shape[-2])
    packed = {"layout": "packed", "cu_seqlens": shards.bounds}
    return validated(
        Workload,
        {
            "pattern": call.pattern,
            # Options are checked even without tokens.
            "batch_size": 1 if shards.packed else query.shape[0] or 1,
            "seq_len": shards.seq_len or 1,
            "num_heads": query.shape[-2],
            "num_kv_heads": key.shape[-2],
            "head_dim": query.shape[-1],
            "dtype": str(query.dtype).removeprefix("torch."),
            "causal": call.causal,
            "window": call.window,
            "scale": call.scale,
            "mode": "both",
            **(packed if shards.packed and shards.seq_len else {}),
        },
    )


def _function(
    workload: Workload, shards: SequenceShards, device: torch.device, call: Call
) -> tuple[ShardedAttention, str]:
    """The function of the first supported algorithm with the same token order, and its name. Raises ValueError."""
    algorithm, backend = call.algorithm, call.backend
    ways, machine, size = own_ways(over_ranks=True), machine_of(device), shards.world.size
    against: list[str] = []
    over_ranks = ways.implementations
    # A single rank uses the algorithms of several.
    names = by_priority(ways, workload, max(2, size)) if algorithm == AUTO else (over_ranks.get(algorithm).name,)
    usable = []
    for name in names:
        way = Way(name, None, workload, size)
        reasons = ways.reasons_against(way, machine)
        if over_ranks.get(name).chooses or (backend != AUTO and not over_ranks.get(name).uses_backend):
            reasons = ("it calls no backend",)
        if not reasons and algorithm == AUTO and _in_another_order(way, shards, ways):
            reasons = (f"it takes tokens in another order than {shards.order}{_hint(shards)}",)
        if reasons:
            against.append(f"{name}: {', '.join(reasons)}")
        else:
            usable.append(way)
    if algorithm == AUTO:
        usable = [way for way in usable if not ways.reasons_unasked(way, machine)] or usable
    # A prediction counts the pairs of every rank, which of a new packing takes longer than a call.
    if len(usable) > 1:
        usable = [way for way, _ in fastest_expected(usable, machine.device, ways)]
    for way in usable:
        loaded = backend_of(backend, way, device) if over_ranks.get(way.implementation).uses_backend else None
        context = BuildContext(device=device, backend=loaded, world=shards._world_on(device))
        built = load_target(over_ranks.get(way.implementation).target)(workload, context)
        if isinstance(built, ShardedAttention) and built.shards == shards.shards:
            return built, way.implementation
        against.append(f"{way.implementation}: it takes tokens in another order than {shards.order}{_hint(shards)}")
    raise ValueError(f"no algorithm over {size} ranks for {workload.label()}: {'; '.join(against)}")


def _in_another_order(way: Way, shards: SequenceShards, ways: Ways) -> bool:
    """Return True if an algorithm is known to take other shards; a single sequence is cut to find out."""
    sharding, size = ways.sharding_of(way.implementation), shards.world.size
    order = sharding.order(way.workload) if sharding is not None and size > 1 else None
    if order is None or order == shards.order:
        return False
    return shards.packed or _cut(way.workload.sequences, order, way.workload.window, size) != shards.shards


def _hint(shards: SequenceShards) -> str:
    if shards.order != "balanced":
        return ""
    return ": those were assigned for causal attention with the window that sequence_shards was given"
