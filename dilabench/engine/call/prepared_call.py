"""A case made ready to be called: target loaded, function built, inputs on the device, one call done."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from dilabench.choice.computation import load_backend
from dilabench.choice.descriptors import load_target
from dilabench.contracts import (
    AttentionFn,
    BufferPool,
    Build,
    BuildContext,
    LoadedBackend,
    NoPool,
    PatternCache,
    WithNotes,
)
from dilabench.distributed.sharding import Shards
from dilabench.distributed.whole import Sharded, Whole
from dilabench.distributed.world import World
from dilabench.engine.call.buffer_pool import SizedBufferPool
from dilabench.engine.call.chunked_queries import build_in_chunks, checkpointed
from dilabench.engine.call.compile_and_graph import OptimizedShards, compiled, compiling, graphed
from dilabench.engine.call.inputs import InputSet, InputStore, make_inputs, rank_seed, result_form
from dilabench.engine.call.kept_call import KeptCall
from dilabench.engine.call.returned import UnusableFunctionError, no_gradient, not_callable, not_plain
from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.call.timed_calls import TimedCalls
from dilabench.engine.call.torch_settings import settings_kept
from dilabench.engine.device.device import device_of
from dilabench.metadata import (
    BUFFER_POOL_HELD_BYTES,
    CUDA_GRAPH_BYTES,
    PATTERN_CACHE_BYTES,
    UNTUNED_DEVICE,
    refuse_unknown,
)
from dilabench.record import Note

MAX_INPUT_SETS = 32
# Bytes of the input sets of one sample. A call that reads its inputs reads fewer in the time of a batch.
BATCHED_BYTES = 2**26
SLOW_CALL_NS = 100_000_000
# For calls shorter than this, the best of this many gives the time: single calls of 2 ms have taken 9 ms.
SHORT_CALL_NS, ESTIMATES = 20_000_000, 4

# Removes a part of the build context (messages, kernels), so that the other part can be timed separately.
Ablation = Callable[[BuildContext], BuildContext]


class PreparedCall:
    """The call that is verified and timed. `fresh` gives one call per sample and first does all work that is not part
    of a call.
    """

    def __init__(
        self,
        spec: CaseSpec,
        device: torch.device,
        input_store: InputStore,
        world: World | None = None,
        ablation: Ablation | None = None,
        shards: dict[int, InputSet] | None = None,
        *,
        keeps_first: bool = False,
    ) -> None:
        self.spec = spec
        self.device = device
        self.workload = spec.case.workload
        # Offloaded inputs stay on the host, in a separate store: other cases of the group use the same inputs on the
        # device.
        self._input_store = InputStore(torch.device("cpu")) if spec.case.optimizations.offload_inputs else input_store
        self.world = world
        self._shards: dict[int, InputSet] = {} if shards is None else shards
        # The counters of a call over ranks, its bytes with those of `fresh` (sent, received), and calls but replays.
        self._traffic: dict[str, int] = {}
        self.counted_calls, self.bytes_of_call = 0, (0, 0)
        self._next = self._calls = 0
        self._sets = 1
        # Further calls are on the current input set, so that each shares its addresses with the one before.
        self.keeps_set = False
        self._dout: Tensor | None = None
        self._out_shape = torch.Size()
        # With `keeps_first`: the first call, and in modes with a backward pass the first of these.
        self.first_calls: list[KeptCall] = []
        self._keeps_first = keeps_first
        self.setup_ns: dict[str, int] = {}
        self.changed_settings: dict[str, str] = {}
        self._optimized_counters: dict[str, int] = {}
        options = spec.case.optimizations
        self.patterns = PatternCache(options.pattern_cache_entries)
        self.buffers: BufferPool = SizedBufferPool(options.buffer_pool_bytes) if options.buffer_pool_bytes else NoPool()
        build, backend = self._timed("import", self._load)
        context = BuildContext(
            device=device,
            backend=backend,
            world=world,
            patterns=self.patterns,
            buffers=self.buffers,
            tiles=options.tiles,
        )
        self.context = ablation(context) if ablation else context
        built: AttentionFn = self._timed("build", lambda: self._built(build))
        self._unoptimized = built
        self.module = built if isinstance(built, torch.nn.Module) else None
        # A module's trainable parameters, read once: its own method could name others when it is timed.
        parameters = torch.nn.Module.parameters(self.module) if self.module is not None else ()
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        # A copy of the module as it was at its verification: what it keeps in later calls does not change this one.
        self.reference: torch.nn.Module | None = None
        self._timed("inputs", lambda: self.inputs(0))
        self._sharded = self._timed("optimize", lambda: self._optimized(built))
        self.function = self.whole if self.takes_whole else self._sharded
        local_row = None if world is None else self._local_row
        self.timed_calls = TimedCalls(spec.seed, self.workload, spec.takes, local_row, own_seeds=not self.takes_whole)
        self._timed("first_call", self._call_once)
        with settings_kept(self.changed_settings):
            self.call_ns = self._estimate_ns()

    def fresh(self) -> Callable[[], object]:
        """The next call to time, on the next input set, with all that is not part of it done.

        forward: no graph is made. backward: the graph is made here, the call computes the gradients of inputs and
        parameters. both: the call does both. Ranks wait for each other here, so that their calls start together.
        """
        inputs = self.inputs(self._next)
        if not self.keeps_set:
            self._next = (self._next + 1) % self._sets
        self._calls += 1
        self.counted_calls += 1
        return self._call_of(inputs, self.timed_calls.before(inputs))

    def capturable(self) -> tuple[Callable[[], object], KeptCall]:
        """A call as `fresh` gives it, whose results stay where they are: for a graph that is replayed.

        The results keep alive what their backward pass reads.
        """
        inputs = self.inputs(self._next)
        # A replayed backward pass belongs to the forward pass before the capture, so its inputs must not change.
        own = inputs.copy() if self._backward_only else inputs
        kept = KeptCall(own, position=self.workload.rows - 1, whole=True)
        return self._call_of(kept.inputs, kept, again=True), kept

    def replayed(self, captured: KeptCall, replay: Callable[[], None]) -> Callable[[], object]:
        """The next replay of a captured call, with all that is not part of it done."""
        self._calls += 1
        kept = self.timed_calls.before(captured.inputs, fixed=self._backward_only)
        self._renew_gradient()
        self._together()
        kept.overwritten = True

        def kept_replay() -> object:
            replay()
            return kept.keep(captured.out, captured.gradients)

        return kept_replay

    def _call_of(self, inputs: InputSet, kept: KeptCall, again: bool = False) -> Callable[[], object]:
        """The call on these inputs, the same code for every call; `kept` gets its results. again: it may be made more
        than once.
        """
        function = self.function
        if self.workload.mode == "forward":
            self._together()
            return lambda: kept.keep(self._forward(inputs))
        targets, dout = [*inputs.distinct, *self.parameters], self.output_gradient()
        if self._backward_only:
            made = function(inputs.q, inputs.k, inputs.v)
            # Only now, so that no gradient can be made in the forward pass, which is not timed.
            self._renew_gradient()
            self._together()

            def backward() -> object:
                gradients = torch.autograd.grad(made, targets, dout, retain_graph=again, allow_unused=True)
                return kept.keep(made, gradients)

            return backward

        def both() -> object:
            out = function(inputs.q, inputs.k, inputs.v)
            return kept.keep(out, torch.autograd.grad(out, targets, dout, allow_unused=True))

        self._renew_gradient()
        self._together()
        return both

    def _renew_gradient(self) -> None:
        if self.timed_calls.active and self.workload.mode != "forward":
            self.timed_calls.renew_gradient(self.output_gradient())

    @property
    def _backward_only(self) -> bool:
        return self.workload.mode == "backward"

    @property
    def row_dim(self) -> int:
        """The axis of positions."""
        return 0 if self.workload.layout == "packed" else 1

    def _local_row(self, position: int) -> int | None:
        if self.takes_whole or self.world is None:
            return position
        _, rows = self.shards.held(torch.tensor([position]), self.world.rank)
        return int(rows[0]) if len(rows) else None

    def _together(self) -> None:
        if self.world is not None:
            self.world.barrier()

    def device_barrier(self) -> None:
        """Queue a wait of this rank's GPU for the others'; no effect on one device."""
        if self.world is not None:
            self.world.device_barrier()

    def inputs(self, index: int) -> InputSet:
        """Input set number `index`; set 0 is the one that every implementation of the workload group shares.

        With several ranks each draws its own shards, because the whole sequence may fit into no rank's memory. With
        sharding inside the call all have the same whole tensors.
        """
        if self.world is not None and not self.takes_whole:
            return self._shard(index, self.world)
        return self._input_store.get(self.workload, self.spec.takes, self.spec.seed + index)

    def _shard(self, index: int, world: World) -> InputSet:
        if index not in self._shards:
            rows = self.shards.rows[world.rank]
            seed = rank_seed(self.spec.seed + index, world.rank)
            self._shards[index] = make_inputs(self.workload, self.spec.takes, seed, self.device, rows)
        return self._shards[index]

    @property
    def shards(self) -> Shards:
        """Which positions each rank holds, of several ranks."""
        return cast(Sharded, self._unoptimized).shards

    @property
    def whole(self) -> AttentionFn:
        """The function of whole tensors: what verification calls. The function itself unless there are ranks."""
        if self.world is None:
            return self.function
        built = cast(Sharded, self._unoptimized)
        sharded = built if self._sharded is built else OptimizedShards(self._sharded, built)
        return Whole(sharded, self.workload.layout == "packed")

    @property
    def takes_whole(self) -> bool:
        return self.world is not None and self.spec.case.optimizations.sharding_inside

    def ablated(self, ablation: Ablation) -> "PreparedCall":
        """The call without a part of it, on the same inputs; what it computes is wrong, so only its time is of use."""
        other = PreparedCall(self.spec, self.device, self._input_store, self.world, ablation, self._shards)
        other._sets = self._sets
        return other

    def rotate(self, batch: int = 1) -> int:
        """Rotate enough input sets that none is still in the GPU's L2 at its next use; return their number.

        Bounded by `MAX_INPUT_SETS` and a quarter of the free memory; then calls may be warm, and `is_cold` says so.
        batch: calls of a sample, each of which has its own set, so that no call repeats one of its sample. Bounded by
        `BATCHED_BYTES`.
        """
        self.timed_calls.batch = batch
        device = device_of(self.device)
        need = 2 * device.l2_bytes
        size = max(1, self.inputs(0).nbytes)
        wanted = min(MAX_INPUT_SETS, -(-need // size)) if need else 1
        if self.world is None:
            wanted = max(wanted, min(batch, BATCHED_BYTES // size))
        if (free := device.free_bytes()) is not None:
            wanted = min(wanted, max(1, free // (4 * size)))
        if self.world is not None:
            # The least of all ranks: with another number of sets, calls of two ranks would not go together.
            wanted = -self.world.max_over_ranks([-wanted])[0]
        self._sets = max(self._sets, 1, wanted)
        return self._sets

    @property
    def rotates(self) -> bool:
        """Return True if there are several input sets."""
        return self._sets > 1

    @property
    def working_set_bytes(self) -> int:
        """Bytes of one input set."""
        return self.inputs(0).nbytes

    @property
    def is_cold(self) -> bool:
        """The input sets in rotation hold at least twice the L2 cache."""
        return self._sets * self.inputs(0).nbytes >= 2 * device_of(self.device).l2_bytes

    def output_gradient(self) -> Tensor:
        """A random gradient of the output, made once."""
        if self._dout is None:
            query = self.inputs(0).q
            rank = self.world.rank if self.world and not self.takes_whole else 0
            generator = torch.Generator(query.device).manual_seed(rank_seed(self.spec.seed + 2**31, rank))
            dtype = result_form(self.workload, self.spec.takes, query)[1]
            self._dout = torch.randn(self._out_shape, generator=generator, device=query.device, dtype=dtype)
        return self._dout

    @property
    def shared_state(self) -> tuple[object, ...]:
        """The state that must be the same on every rank of a call: calls made, sets of inputs, and all draws."""
        return self._calls, self._next, self._sets, *self.timed_calls.drawn

    def counters(self) -> dict[str, int]:
        """Counters of the optimizations and messages, by key. Raises PluginError for an unknown key."""
        counted = {**self.patterns.counters(), **self.buffers.counters(), **self._optimized_counters, **self._traffic}
        refuse_unknown("counter", counted)
        return counted

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes of the function on how it was built, and notes on the device.

        Raises PluginError for an unknown code.
        """
        built, warning = self._unoptimized, device_of(self.device).facts.warning
        notes = tuple(built.notes) if isinstance(built, WithNotes) else ()
        refuse_unknown("note", [note.code for note in notes])
        return notes if warning is None else (UNTUNED_DEVICE.note(warning), *notes)

    @property
    def built(self) -> AttentionFn:
        """The result of `build`."""
        return self._unoptimized

    @property
    def held_bytes(self) -> int:
        """Bytes that the optimizations keep between calls; they count into the call's peak."""
        counted = self.counters()
        kept = (PATTERN_CACHE_BYTES, BUFFER_POOL_HELD_BYTES, CUDA_GRAPH_BYTES)
        return sum(counted.get(weak.key, 0) for weak in kept)

    def forget(self) -> None:
        """Drop what is kept between calls, as when the device is lost or the case is over."""
        self.timed_calls.release()
        self.patterns.clear()
        self.buffers.clear()

    def _load(self) -> tuple[Any, LoadedBackend | None]:
        build, backend = load_target(self.spec.target), self.spec.backend
        return build, load_backend(backend) if backend else None

    def _built(self, build: Build) -> AttentionFn:
        options = self.spec.case.optimizations
        if options.query_chunk or options.offload_inputs:
            return build_in_chunks(build, self.workload, self.context, options.query_chunk or self.workload.seq_len)
        built = build(self.workload, self.context)
        if (why := not_callable(built)) is not None:
            raise UnusableFunctionError(why)
        return built

    def _optimized(self, function: AttentionFn) -> AttentionFn:
        options = self.spec.case.optimizations
        if options.gradient_checkpointing:
            function = checkpointed(function)
        if options.compile:
            function = compiled(function)
        if options.cuda_graph:
            if not device_of(self.device).has_graphs:
                raise ValueError("cuda_graph=true needs a CUDA device; leave it out elsewhere")
            # Capturing calls the function, so that it is compiled there already.
            with self._compiling(options.compile):
                samples = self._shard(0, self.world) if self.world else self.inputs(0)
                function, held_bytes = graphed(function, samples)
            self._optimized_counters[CUDA_GRAPH_BYTES.key] = held_bytes
        return function

    def _compiling(self, happens: bool) -> AbstractContextManager[None]:
        return compiling(self._optimized_counters, self.world is not None) if happens else nullcontext()

    def _forward(self, inputs: InputSet) -> Tensor:
        with torch.no_grad():
            return self.function(inputs.q, inputs.k, inputs.v)

    def _call_once(self) -> None:
        inputs = self.inputs(0)
        options = self.spec.case.optimizations
        with self._compiling(options.compile and not options.cuda_graph):
            out = self._forward(inputs)
            if (why := not_plain(out)) is not None:
                raise UnusableFunctionError(f"the first call {why}")
            self._out_shape = out.shape
            if self._keeps_first:
                self.first_calls.append(KeptCall(inputs, self.workload.rows - 1, out=out))
            del out
            if self.workload.mode != "forward":
                try:
                    if self._keeps_first:
                        self.first_calls.append(KeptCall(inputs, self.workload.rows - 1, whole=True))
                        self._call_of(inputs, self.first_calls[-1])()
                    else:
                        self.fresh()()
                except RuntimeError:
                    self._refuse_without_gradient(inputs)
                    raise

    def _refuse_without_gradient(self, inputs: InputSet) -> None:
        out = self.function(inputs.q, inputs.k, inputs.v)
        if (why := no_gradient(out)) is not None:
            raise UnusableFunctionError(why)

    def _estimate_ns(self) -> int:
        """The time of a call: of later calls, unless the first was so long that its set-up hardly counts."""
        if self.world is not None:
            return self._estimate_together_ns(self.world)
        device, first_ns = device_of(self.device), self.setup_ns["first_call"]
        if first_ns > SLOW_CALL_NS and not device.facts.own_memory and self.workload.mode == "forward":
            return first_ns
        found: list[int] = []
        # Launches may be quicker from the third call on, which counts for short calls.
        while len(found) < ESTIMATES and (not found or found[-1] < SHORT_CALL_NS):
            call = self.fresh()
            device.synchronize()
            started = time.perf_counter_ns()
            call()
            device.synchronize()
            found.append(max(1, time.perf_counter_ns() - started))
        return min(found)

    def _estimate_together_ns(self, world: World) -> int:
        """The slowest rank's second call, the same number on every rank; its bytes are the counted ones."""
        world.traffic.clear()
        call = self.fresh()
        before = world.traffic.total()
        world.traffic.clear()
        started = time.perf_counter_ns()
        call()
        device_of(self.device).synchronize()
        elapsed = time.perf_counter_ns() - started
        self._traffic = world.traffic.counters()
        sent, received = world.traffic.total()
        self.bytes_of_call = before[0] + sent, before[1] + received
        return max(1, world.max_over_ranks([elapsed])[0])

    def _timed(self, stage: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter_ns()
        with settings_kept(self.changed_settings):
            result = work()
        device_of(self.device).synchronize()
        self.setup_ns[stage] = max(0, time.perf_counter_ns() - started)
        return result
