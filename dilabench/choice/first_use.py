"""`backend="auto"` on a GPU: the fastest of all implementations that support a call, measured at its first use.

The fastest one depends on lengths, head dim, segments, windows and the GPU. Rules predict it badly: over 84 random
shapes on an H200 their choice was over 1.1 times slower than the best one in 28. So all are run once on random
numbers, and this machine's tune file (which `dilabench tune` writes, too) stores the result for all calls of that
configuration at nearly that length. `DILABENCH_FIRST_USE=0` uses the rules instead.

Ranks of a job that measure separately may differ. All of them take the choice of the first one, published in the
store of their default process group: no rank waits, and ranks may ask in any order.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from dilabench.choice.measured import TunedCell, device_name, measured_near, remember, tune_path
from dilabench.choice.rules import Choice, by_priority, choose_after, usable
from dilabench.choice.ways import Way, Ways, way_name
from dilabench.errors import DilabenchError, said
from dilabench.impls.operator_rules import forward_before_backward
from dilabench.machine import Machine
from dilabench.workload.spec import Workload

SWITCH = "DILABENCH_FIRST_USE"
WARMUP, CALLS, REPEATS = 3, 3, 3
LONGEST_WAIT_S, CYCLES_PER_S = 0.1, 2e9
AS_GOOD = 1.1
# An implementation whose second call takes this many times the best one's is not called again: some take seconds while
# others take milliseconds.
HOPELESS = 4
# Operands, results, gradients, and as much again for an implementation's workspace.
ROOM = 16

logger = logging.getLogger(__name__)

Build = Callable[[Way], Any]
"""The computation of a way (`impls.one_operator.Computation`); None if it has none."""


class Cost(NamedTuple):
    """Seconds of one call on the GPU, and on the host that launches it."""

    gpu: float
    host: float

    @property
    def seen(self) -> float:
        """Return the time of one of many consecutive calls: the larger of both, because the host runs ahead."""
        return max(self.gpu, self.host)

    @property
    def is_of_host(self) -> bool:
        """Return True if the host's launch time exceeds the GPU time."""
        return self.host > self.gpu


def fastest(ways: Ways, machine: Machine, workload: Workload, device: torch.device, build: Build) -> Choice:
    """Choose by known measurements of the workload, else by measuring, else by the rules. All ranks of a job with the
    same GPU get the same choice.

    Raises ConfigError if nothing can compute the workload on this machine.
    """
    near = measured_near(ways, machine, workload)
    if near is None and _may_measure(workload, device):
        # Measure on the device of the tensors, clocks included.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            cell = measure(ways, machine, workload, device, build)
        if cell is not None:
            try:
                remember(tune_path(machine), machine, [cell])
            except DilabenchError as error:
                # The result still serves this process.
                logger.warning("the measured choice is not stored: %s", error)
            choice = Choice(cell.implementation, cell.backend, "first use", cell.times)
            return _of_all_ranks(choice, ways, machine, workload, device)
    return _of_all_ranks(choose_after(near, ways, machine, workload), ways, machine, workload, device)


def _of_all_ranks(choice: Choice, ways: Ways, machine: Machine, workload: Workload, device: torch.device) -> Choice:
    """Return the choice that a rank published first; this rank's choice if that one cannot run here."""
    store = _store_of_ranks(device)
    if store is None:
        return choice
    question = f"{device_name(machine)} {workload.model_dump_json()}"
    proposal = json.dumps([choice.implementation, choice.backend])
    try:
        key = f"dilabench/{hashlib.sha256(question.encode()).hexdigest()}"
        implementation, backend = json.loads(store.compare_set(key, "", proposal))
    # The store's rank has exited, which the end of the job reports.
    except RuntimeError as error:
        logger.warning("ranks may compute %s in different ways: %s", workload.label(), said(error))
        return choice
    if (implementation, backend) == (choice.implementation, choice.backend):
        return choice
    other = Way(implementation, backend, workload)
    if not usable(ways, machine, other, measured=True):
        logger.warning("another rank computes %s by %s, which cannot run here", workload.label(), way_name(other))
        return choice
    return Choice(implementation, backend, "another rank")


def _store_of_ranks(device: torch.device) -> Store | None:
    """Return the default process group's store; None on a CPU, as a forked data loader would share its connection."""
    if device.type != "cuda" or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return distributed_c10d._get_default_store()


def measure(ways: Ways, machine: Machine, workload: Workload, device: torch.device, build: Build) -> TunedCell | None:
    """Run every implementation on random numbers, compiling if necessary; None if fewer than two run."""
    generator = torch.Generator(device).manual_seed(0)
    queries, keys, dims = workload.num_heads, workload.num_kv_heads, (workload.head_dim, workload.value_width)
    heads = (queries, dims[0]), (queries, dims[1]), (keys, dims[0]), (keys, dims[1])
    shapes = [(workload.batch_size, workload.seq_len, *of_head) for of_head in heads]
    dtype = getattr(torch, workload.dtype)
    q, dout, k, v = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes)
    costs: list[tuple[Cost, Way]] = []
    for way in ways_to_measure(ways, machine, workload):
        try:
            computation = build(way)
            if computation is not None:
                limit = HOPELESS * min((cost.seen for cost, _ in costs), default=math.inf)
                gradient = dout if workload.mode != "forward" else None
                costs.append((_cost(computation, (q, k, v), gradient, limit), way))
        # Kernels of other packages may raise anything; the remaining ones are still measured.
        except Exception as error:  # noqa: BLE001
            logger.info("%s cannot serve %s: %s", way_name(way), workload.label(), said(error))
    if len(costs) < 2:
        return None
    (cost, best), *slower = ranked(costs)
    next_cost, second = slower[0]
    return TunedCell(
        workload=workload,
        implementation=best.implementation,
        backend=best.backend,
        median_ns=round(cost.seen * 1e9),
        launching=cost.is_of_host,
        runner_up=way_name(second),
        runner_up_ns=round(next_cost.seen * 1e9),
        runner_up_launching=next_cost.is_of_host,
        lead=min(min(other.gpu / cost.gpu, other.seen / cost.seen) for other, _ in slower),
    )


def ranked(costs: Sequence[tuple[Cost, Way]]) -> list[tuple[Cost, Way]]:
    """Sort by cost, best first; among nearly equal costs of consecutive calls, the smallest GPU time is first."""
    least = min(cost.seen for cost, _ in costs)
    return sorted(costs, key=lambda pair: pair[0].gpu if pair[0].seen <= AS_GOOD * least else pair[0].seen + least)


def ways_to_measure(ways: Ways, machine: Machine, workload: Workload) -> list[Way]:
    """Return every implementation with a priority that is worth trying, over every such backend that supports it here;
    if there is only one, also the plain method.
    """
    served = [*_served(ways, machine, workload, by_priority(ways, workload))]
    if len(served) < 2:
        plain = (
            implementation.name
            for implementation in ways.implementations
            if implementation.role == "plain" and implementation.takes == "heads"
        )
        served += _served(ways, machine, workload, plain)
    return served


def _served(ways: Ways, machine: Machine, workload: Workload, names: Iterable[str]) -> Iterator[Way]:
    """Yield the named implementations over each backend that supports the workload."""
    # Loaded here, for most calls choose nothing.
    from dilabench.impls.packed import tiles_serve

    for name in names:
        over: tuple[str | None, ...] = (None,)
        in_tiles = False
        if ways.implementations.get(name).uses_backend:
            over = ways.preferred_backends(machine)
            # Dilabench's tiles compute packed sequences alike over each backend without a kernel for them.
            in_tiles = workload.layout == "packed" and tiles_serve(workload, torch.device(machine.device))
        for backend in over:
            way = Way(name, backend, workload)
            if ways.reasons_against(way, machine) or ways.reasons_untried(way, machine):
                continue
            # Each length of packed sequences would be prepared by itself, which takes seconds.
            has_none = workload.layout == "packed" and backend and not ways.backends.get(backend).packed_target
            if has_none and not in_tiles:
                continue
            if backend is None or not ways.reasons_against_backend(way, machine):
                in_tiles = in_tiles and not has_none
                yield way


def _may_measure(workload: Workload, device: torch.device) -> bool:
    if device.type != "cuda" or os.environ.get(SWITCH) == "0":
        return False
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return False
        operand = workload.tokens * workload.num_heads * workload.head_dim * getattr(torch, workload.dtype).itemsize
        return ROOM * operand < torch.cuda.mem_get_info()[0]


def _cost(computation: Any, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor | None, limit: float) -> Cost:
    """Return the smallest cost of a few repetitions, whose launches queue behind a waiting kernel; the cost of the one
    call if it takes longer than `limit` seconds."""

    def call() -> None:
        if dout is None:
            computation.forward(*inputs)
        else:
            out, lse = forward_before_backward(computation, *inputs)[:2]
            computation.backward(dout, *inputs, out, lse)

    def launched() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    gpu, host = [], 0.0
    with torch.no_grad():
        for at in range(WARMUP):
            # The first call compiles; the last gives the host's time.
            torch.cuda.synchronize()
            began = time.perf_counter()
            host = launched()
            torch.cuda.synchronize()
            if at and (took := time.perf_counter() - began) > limit:
                return Cost(took, host)
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            torch.cuda._sleep(int(min(LONGEST_WAIT_S, 2 * CALLS * host) * CYCLES_PER_S))
            start.record()
            host = min(host, *(launched() for _ in range(CALLS)))
            stop.record()
            stop.synchronize()
            gpu.append(start.elapsed_time(stop) / 1e3 / CALLS)
    return Cost(min(gpu), host)
