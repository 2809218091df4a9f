"""`dilabench describe`: everything known about one name."""

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dilabench.cli.options import AsJson
from dilabench.cli.show.availability import limits_of, reasons_against
from dilabench.cli.terminal import say, say_folded
from dilabench.errors import DilabenchError
from dilabench.machine import Machine, detect
from dilabench.patterns.block_masks import PREFERENCES
from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.patterns.pattern import Pattern, SequenceShape
from dilabench.patterns.registry import PatternKind, pattern_type
from dilabench.plugins.catalogue import Catalogue
from dilabench.plugins.descriptors import ANY_PATTERN, Backend, Implementation, Reporter, Suite, Timer, WorkloadPreset
from dilabench.plugins.manager import REGISTRIES, discover
from dilabench.predict.time import expected_time
from dilabench.request import run_request
from dilabench.retired import ANY_KIND, no_such_name
from dilabench.suites.planner import expand, workload_request
from dilabench.units import format_bytes, format_count, format_seconds
from dilabench.workload.ranges import ALL, RANGES, range_lengths
from dilabench.workload.spec import Workload, attended_pairs, flops, tensor_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Facts = Iterator[tuple[str, str]]
EXAMPLE_LENGTH = 48
INDENT = 21
SHADES = " ░▒▓█"
# Characters are about twice as high as wide.
MAX_COLUMNS, MAX_LINES = 48, 24
EXAMPLE_BLOCKS = 32
EXAMPLE_DENSITY = 0.25


def describe(
    name: Annotated[str, typer.Argument(help="Name or alias of what `dilabench list` shows, of a range or a mask.")],
    as_json: AsJson = False,
) -> None:
    """Show everything known about a name; if several things have this name, all of them."""
    catalogue, machine = discover().catalogue, detect()
    sheets = [sheet for registry in REGISTRIES for sheet in _sheets(catalogue, registry, name, machine)]
    if name in (*RANGES, ALL):
        sheets.append(("range", [("lengths", " ".join(map(str, range_lengths(name))))]))
    if name in PREFERENCES:
        sheets.append(("mask", list(_mask_facts(name))))
    if not sheets:
        known = {other for registry in REGISTRIES for other in getattr(catalogue, registry).names}
        raise no_such_name(ANY_KIND, name, [*known, *RANGES, *PREFERENCES])
    if as_json:
        document = [{"kind": kind, "name": name, "facts": [list(fact) for fact in facts]} for kind, facts in sheets]
        say(json.dumps(document, indent=2, ensure_ascii=False))
        return
    for index, (kind, facts) in enumerate(sheets):
        say(("\n" if index else "") + f"{kind} {name}")
        for key, value in facts:
            line = f"  {key + ':' if key else '':<18} {value}"
            # A picture keeps its lines.
            if "\n" in value:
                say(line)
            else:
                say_folded(line, " " * INDENT)


def _sheets(
    catalogue: Catalogue, registry_name: str, name: str, machine: Machine
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    registry = getattr(catalogue, registry_name)
    if name not in registry:
        return
    descriptor = registry.get(name)
    facts = [("summary", descriptor.summary)]
    if name != descriptor.name:
        facts.append(("alias of", descriptor.name))
    if descriptor.aliases:
        facts.append(("aliases", ", ".join(descriptor.aliases)))
    facts.append(("plug-in", registry.origin(name)))
    if isinstance(descriptor, WorkloadPreset):
        facts += _workload_facts(catalogue, descriptor, machine)
    elif isinstance(descriptor, PatternKind):
        facts += _pattern_facts(catalogue, descriptor)
    else:
        facts += _target_facts(descriptor, catalogue, machine)
    yield registry.kind, facts


def _pattern_facts(catalogue: Catalogue, kind: PatternKind) -> Facts:
    yield "target", kind.target
    pattern = pattern_type(kind.name)
    for name, field in pattern.request_model().model_fields.items():
        if name != "kind":
            yield f"--set {name}", str(field.get_default(call_default_factory=True))
    example = pattern.examples()[0]
    shape = SequenceShape(EXAMPLE_LENGTH, 4, 4, causal=False, window=(-1, -1))
    if shown := _pattern_picture(example, shape):
        yield "example", f"{example.label()}, {EXAMPLE_LENGTH} tokens, head 0"
        yield "", shown
    able = (
        implementation.name
        for implementation in catalogue.implementations
        if implementation.supports.patterns & {kind.name, *ANY_PATTERN} and implementation.takes != "model"
    )
    yield "computed by", ", ".join(able)


def _target_facts(descriptor: object, catalogue: Catalogue, machine: Machine) -> Facts:
    yield "target", str(getattr(descriptor, "target"))  # noqa: B009 - every descriptor but a preset has one
    if isinstance(descriptor, Backend):
        yield "backward", descriptor.backward_target or "none"
        yield (
            "priority",
            ", ".join(f"{there} {rank}" for there, rank in descriptor.priority.items()) or "none: by name only",
        )
    if isinstance(descriptor, Implementation | Backend) and descriptor.install:
        yield "install", descriptor.install
    if isinstance(descriptor, Implementation):
        yield "takes", "q, k, v [B, N, H, D]" if descriptor.takes == "heads" else f"{descriptor.takes} [B, N, E]"
        only = " or ".join(descriptor.backends)
        yield "calls a backend", (f"only {only}" if only else "yes") if descriptor.uses_backend else "no"
        yield "role", descriptor.role
        yield "deterministic", "yes" if descriptor.deterministic else "not promised"
        if descriptor.quirks:
            yield "quirks", "; ".join(descriptor.quirks)
    if isinstance(descriptor, Suite):
        yield from _suite_facts(descriptor, catalogue, machine)
    if isinstance(descriptor, Reporter) and descriptor.filename:
        yield "writes", descriptor.filename
    if isinstance(descriptor, Timer):
        yield "proves", descriptor.proves
    if isinstance(descriptor, Implementation | Backend):
        yield "requires", ", ".join(descriptor.requires) or "nothing beyond torch"
        yield "limits", "; ".join(limits_of(descriptor)) or "none"
    reasons = reasons_against(descriptor, machine)
    yield "usable here", "no: " + "; ".join(reasons) if reasons else "yes"


def _suite_facts(suite: Suite, catalogue: Catalogue, machine: Machine) -> Facts:
    """Describe the cases of `dilabench run SUITE` without options on this machine."""
    yield "answer", f"the fastest by {suite.axis.name}"
    yield "budget", "none" if suite.budget_s is None else f"{format_seconds(suite.budget_s)} (--budget sets another)"
    if suite.options and suite.options.model_fields:
        yield "own options", ", ".join(suite.options.model_fields)
    request = run_request(catalogue, suite=suite.name)
    try:
        planned = expand(catalogue, machine, request)
    except DilabenchError as error:
        yield "rows here", f"none as it stands: {error}"
        return
    cases = [case.case for case in planned if case.skip is None]
    yield (
        "rows here",
        f"{len(planned)}, all of which run"
        if len(cases) == len(planned)
        else (f"{len(planned)}, of which {len(cases)} run"),
    )
    yield "lengths here", ", ".join(map(format_count, sorted({case.case.workload.seq_len for case in planned})))
    yield "time here", expected_time(cases, machine, os.cpu_count() or 1, suite.budget_s)


def _workload_facts(catalogue: Catalogue, preset: WorkloadPreset, machine: Machine) -> Facts:
    if preset.members:
        yield "set of", ", ".join(preset.members)
        return
    workload = workload_request(catalogue, preset.name, {}).resolve(machine.auto_dtype, machine.auto_tokens)
    yield "workload", workload.label()
    yield from _field_facts(workload)
    if shown := _pattern_picture(workload.pattern, workload.shapes[0]):
        yield "head 0", shown
    pairs = attended_pairs(workload)
    yield "attended pairs", f"{pairs:,}"
    yield (
        "FLOPs",
        ", ".join(f"{mode} {flops(workload.replace(mode=mode)):.4g}" for mode in ("forward", "backward", "both")),
    )
    sizes = tensor_bytes(workload)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    yield "tensors", f"{format_bytes(sum(sizes.values()))} ({parts})"
    yield "family", workload.family_id()
    for implementation in catalogue.implementations:
        reasons = (
            *reasons_against(implementation, machine),
            *catalogue.unsupported(implementation, workload, machine.device),
        )
        yield implementation.name, "no: " + "; ".join(dict.fromkeys(reasons)) if reasons else "can compute it here"


def _field_facts(workload: Workload) -> Facts:
    for name, value in workload.model_dump(exclude={"pattern"}, exclude_none=True).items():
        yield name, str(value)
    for name, value in workload.pattern.model_dump(exclude_none=True).items():
        yield "pattern" if name == "kind" else f"pattern.{name}", str(value)


def picture(shares: "NDArray[np.float64]") -> list[str]:
    """Shares of cells [lines, columns] as lines of shades: a line is one row or several, a column keys.

    A character is as dark as the share of its cell that is computed; any share above 0 shows.
    """
    import numpy as np

    shades = np.ceil(shares * (len(SHADES) - 1)).astype(int)
    return ["".join(SHADES[level] for level in line) for line in shades]


def _mask_facts(kind: str) -> Facts:
    """Describe a kind of block mask, with an example."""
    yield "summary", str(PREFERENCES[kind].__doc__).partition(": ")[2]
    pattern = BlockSparsePattern(mask=kind, block_size=1, sparsity=1 - EXAMPLE_DENSITY)  # type: ignore[arg-type]
    yield "example", f"{EXAMPLE_BLOCKS} blocks a side, {EXAMPLE_DENSITY:.0%} of them computed"
    for causal, name in ((False, "not causal"), (True, "causal")):
        shown = _pattern_picture(pattern, SequenceShape(EXAMPLE_BLOCKS, 1, 1, causal, (-1, -1)))
        assert shown is not None
        yield name, shown


def _pattern_picture(pattern: Pattern, shape: SequenceShape) -> str | None:
    """Return the picture of head 0 over a sequence, for the value column of `describe`; None if there is none."""
    shares = pattern.shares(shape, MAX_LINES, MAX_COLUMNS)
    return None if shares is None else ("\n" + " " * INDENT).join(picture(shares))
