"""Suite `billion`: 2^30 tokens on what is there, really computed: resident on one device or over ranks where they fit,
else streamed in pieces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dilabench.choice.rules import by_priority
from dilabench.errors import ConfigError, unknown_name
from dilabench.machine import rank_memory_bytes
from dilabench.metadata import FORM, PART
from dilabench.plugins.descriptors import Implementation
from dilabench.predict.memory import plan_memory
from dilabench.record import PlannedCase, Skipped
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner
from dilabench.suites.ring.cases import ranks_here
from dilabench.units import format_count, parse_count
from dilabench.workload.cuts import cut_length, why_uncut
from dilabench.workload.spec import WorkloadRequest

BILLION = 2**30
# One head of 64 is what four H200 hold at once (kernels.md §6).
SHAPE = {"batch_size": 1, "num_heads": 1, "head_dim": 64}
AUTO = "auto"
# Of a host's memory others use a part, of a GPU's only the context and the communicators.
RESIDENT_SHARE = {"large": 0.95, "small": 0.5}
PIECE_SHARE = 0.25
# Long enough to fill a device, short enough that a piece lasts seconds at most.
LONGEST_PIECE = {"large": 2**25, "small": 2**17}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be computed: so many tokens of a workload, within so much memory.

    implementation: the one asked for; None leaves it to the form.
    """

    planner: Planner
    implementation: Implementation | None
    asked: WorkloadRequest
    tokens: int
    memory_limit_bytes: int | None

    @property
    def device(self) -> str:
        """The kind of device: 'cpu', 'cuda' or another."""
        return self.planner.machine.device

    def plan(self, length: int, form: str, ranks: int = 1, **changes: Any) -> tuple[PlannedCase, ...]:
        """The case at a length; its labels say the form and which part of a billion it is."""
        part = f"{format_count(self.tokens)} tokens, {self.tokens / BILLION:.3g} of 2^30"
        labels = FORM.entry(form) | PART.entry(part)
        asked = self.asked.model_copy(update={"seq_len": length})
        there = self.planner.asking(nproc=ranks)
        planned = there.plan(self.implementation or self._best(asked, ranks), asked, labels, **changes)
        return tuple(one.isolated(self.memory_limit_bytes) for one in planned)

    def _best(self, asked: WorkloadRequest, ranks: int) -> Implementation:
        """Of the highest priority among those for this device; its row says what else may be in the way."""
        machine, shelf = self.planner.machine, self.planner.catalogue.implementations
        workload = asked.resolve(machine.auto_dtype, machine.auto_tokens)
        found = [shelf.get(name) for name in by_priority(self.planner.catalogue, workload, ranks)]
        here = [one for one in found if machine.facts.word_in(one.supports.devices) in one.supports.devices]
        if not found:
            raise ConfigError(f"nothing computes {workload.label()} unasked; name an implementation with -i")
        return (here or found)[0]

    def fits(self, length: int, share: float, ranks: int = 1) -> bool:
        """Whether every backend's plan at this length takes at most a share of a rank's memory.

        Without a trace it does not.
        """
        capacity = self.memory_limit_bytes or rank_memory_bytes(self.planner.machine, ranks) or 0
        plans = [plan_memory(one.case, self.device, self.planner.catalogue) for one in self.plan(length, "", ranks)]
        return all(plan is not None and plan.peak_bytes <= share * capacity for plan in plans)


Form = Callable[[Order], tuple[PlannedCase, ...]]


def resident(order: Order) -> tuple[PlannedCase, ...]:
    """All tokens as one sequence in the memory of one device."""
    return order.plan(order.tokens, "resident: one sequence in memory")


def over_ranks(order: Order) -> tuple[PlannedCase, ...]:
    """All tokens as one sequence in the memories of several devices, a part of it in each."""
    ranks = _ranks(order.planner)
    return order.plan(order.tokens, f"resident over {ranks} ranks: one sequence", ranks)


def streamed(order: Order) -> tuple[PlannedCase, ...]:
    """Pieces of whole segments, one after another, each a sequence of its own: tokens processed, never one sequence."""
    whole = order.asked.model_copy(update={"seq_len": order.tokens}).resolve(order.planner.machine.auto_dtype)
    cut = cut_length(whole)
    if cut is None:
        skip = Skipped(code="unsupported", why=why_uncut(whole))
        return tuple(one.model_copy(update={"skip": skip}) for one in order.plan(order.tokens, "streamed"))
    length = cut
    longest = min(order.tokens, max(cut, LONGEST_PIECE[order.planner.machine.facts.size]))
    while 2 * length <= longest and order.fits(2 * length, PIECE_SHARE):
        length *= 2
    return order.plan(length, f"streamed, {format_count(order.tokens)} tokens processed", stream_tokens=order.tokens)


FORMS: Mapping[str, Form] = {"resident": resident, "ranks": over_ranks, "streamed": streamed}
ON_ONE_DEVICE = ("resident", "streamed")


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """One row per implementation, in the form asked for or the first that fits."""
    tokens = parse_count(request.options.get("tokens", BILLION), "tokens")
    name = str(request.options.get("form", AUTO))
    if name not in {AUTO, *FORMS}:
        raise unknown_name("form", name, [AUTO, *FORMS])
    if name in ON_ONE_DEVICE and request.nproc > 1:
        raise ConfigError(
            f"form {name!r} is for one device, but --nproc {request.nproc} asks for ranks; use --form ranks or auto, "
            "or leave --nproc out"
        )
    limit = request.options.get("memory_limit")
    planned: list[PlannedCase] = []
    for asked in planner.workload_requests([SHAPE]):
        for implementation in planner.implementations(()) or (None,):
            order = Order(
                planner=planner,
                implementation=implementation,
                asked=asked,
                tokens=tokens,
                memory_limit_bytes=None if limit is None else parse_count(limit, "memory_limit"),
            )
            planned += _first_that_fits(order) if name == AUTO else FORMS[name](order)
    return tuple(planned)


def _first_that_fits(order: Order) -> tuple[PlannedCase, ...]:
    """One sequence on one device, else over ranks, else a stream; with `--nproc` over ranks, else a stream."""
    planner, share = order.planner, RESIDENT_SHARE[order.planner.machine.facts.size]
    if planner.request.nproc == 1 and order.fits(order.tokens, share):
        return resident(order)
    several_gpus = order.device == "cuda" and len(planner.machine.gpus) > 1
    if (planner.request.nproc > 1 or several_gpus) and order.fits(order.tokens, share, _ranks(planner)):
        return over_ranks(order)
    return streamed(order)


def _ranks(planner: Planner) -> int:
    """As many as were asked for, else one per GPU."""
    return planner.request.nproc if planner.request.nproc > 1 else ranks_here(planner)
