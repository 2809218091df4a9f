"""Suite `billion`: 2^30 tokens on what is there, really computed: resident where they fit, else streamed in pieces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dilabench.config import RunRequest
from dilabench.cuts import cut_length, why_uncut
from dilabench.errors import unknown_name
from dilabench.memory_plan import plan_memory
from dilabench.registry import Implementation
from dilabench.results import PlannedCase
from dilabench.spec import WorkloadRequest
from dilabench.suites.measured_alone import alone_labels
from dilabench.suites.planner import Planner, refuse_unknown_options
from dilabench.suites.room import memory_bytes
from dilabench.units import format_count, parse_count

BILLION = 2**30
OPTIONS = ("tokens", "form", "memory_limit")
IMPLEMENTATIONS = {"cuda": ("fused",), "cpu": ("strided",)}
# One head of 64 is what four H200 hold at once (kernels.md §6).
SHAPE = {"batch_size": 1, "num_heads": 1, "head_dim": 64}
AUTO = "auto"
# Of a host's memory others use a part, of a GPU's only the context.
RESIDENT_SHARE = {"cuda": 0.95, "cpu": 0.5}
PIECE_SHARE = 0.25
# Long enough to fill a device, short enough that a piece lasts seconds at most.
LONGEST_PIECE = {"cuda": 2**25, "cpu": 2**17}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be computed: so many tokens of a workload by an implementation, within so much memory."""

    planner: Planner
    implementation: Implementation
    asked: WorkloadRequest
    tokens: int
    memory_limit_bytes: int | None

    @property
    def capacity_bytes(self) -> int:
        """What there is to fit into."""
        return self.memory_limit_bytes or memory_bytes(self.planner.machine) or 0

    def plan(self, length: int, form: str, **changes: int) -> tuple[PlannedCase, ...]:
        """The case at a length; its labels say the form and which part of a billion it is."""
        part = f"{format_count(self.tokens)} tokens, {self.tokens / BILLION:.3g} of 2^30"
        labels = alone_labels(self.memory_limit_bytes, form=form, part=part)
        asked = self.asked.model_copy(update={"seq_len": length})
        return self.planner.plan(self.implementation, asked, labels, **changes)

    def fits(self, length: int, share: float) -> bool:
        """Whether every backend's plan at this length takes at most a share of the memory; without a formula, no."""
        plans = [plan_memory(one.case, self.planner.machine.device) for one in self.plan(length, "")]
        return all(plan is not None and plan.peak_bytes <= share * self.capacity_bytes for plan in plans)


Form = Callable[[Order], tuple[PlannedCase, ...]]


def resident(order: Order) -> tuple[PlannedCase, ...]:
    """All tokens as one sequence in the memory of one device."""
    return order.plan(order.tokens, "resident: one sequence in memory")


def streamed(order: Order) -> tuple[PlannedCase, ...]:
    """Pieces of whole segments, one after another, each a sequence of its own: tokens processed, never one sequence."""
    whole = order.asked.model_copy(update={"seq_len": order.tokens}).resolve(order.planner.machine.auto_dtype)
    cut = cut_length(whole)
    if cut is None:
        length = order.tokens
        return tuple(one.model_copy(update={"skip": why_uncut(whole)}) for one in order.plan(length, "streamed"))
    length = cut
    longest = min(order.tokens, max(cut, LONGEST_PIECE[order.planner.machine.device]))
    while 2 * length <= longest and order.fits(2 * length, PIECE_SHARE):
        length *= 2
    return order.plan(length, f"streamed, {format_count(order.tokens)} tokens processed", stream_tokens=order.tokens)


# A form over several ranks registers here under a name of its own; `auto` then has to know when it is the one.
FORMS: Mapping[str, Form] = {"resident": resident, "streamed": streamed}


def expand(request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """One row per implementation, in the form asked for or the first that fits."""
    refuse_unknown_options(request, OPTIONS)
    tokens = parse_count(request.options.get("tokens", BILLION), "tokens")
    name = str(request.options.get("form", AUTO))
    if name not in {AUTO, *FORMS}:
        raise unknown_name("form", name, [AUTO, *FORMS])
    limit = request.options.get("memory_limit")
    planned: list[PlannedCase] = []
    for asked in planner.workload_requests([SHAPE]):
        for implementation in planner.implementations(IMPLEMENTATIONS[planner.machine.device]):
            order = Order(
                planner=planner,
                implementation=implementation,
                asked=asked,
                tokens=tokens,
                memory_limit_bytes=None if limit is None else parse_count(limit, "memory_limit"),
            )
            planned += _in_form(order, name)
    return tuple(planned)


def _in_form(order: Order, name: str) -> tuple[PlannedCase, ...]:
    if name != AUTO:
        return FORMS[name](order)
    return (resident if order.fits(order.tokens, RESIDENT_SHARE[order.planner.machine.device]) else streamed)(order)
