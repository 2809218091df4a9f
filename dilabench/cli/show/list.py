"""`dilabench list`: what there is, and what of it can be used here."""

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from dilabench.cli.options import AsJson
from dilabench.cli.show.availability import limits_of, reasons_against
from dilabench.cli.terminal import print_table, say, say_folded
from dilabench.machine import Machine, detect
from dilabench.plugins.descriptors import Backend, Implementation, WorkloadPreset
from dilabench.plugins.manager import Found, discover
from dilabench.validation import validated
from dilabench.workload.ranges import RANGES
from dilabench.workload.spec import WorkloadRequest

PLUGINS = "plugins"


class Kind(StrEnum):
    """The kinds that can be listed."""

    PATTERNS = "patterns"
    IMPLEMENTATIONS = "implementations"
    BACKENDS = "backends"
    WORKLOADS = "workloads"
    SUITES = "suites"
    REPORTERS = "reporters"
    TIMERS = "timers"
    PLUGINS = PLUGINS


def list_names(
    kind: Annotated[Kind | None, typer.Argument(help="Kind to list; all by default.")] = None,
    why: Annotated[bool, typer.Option("--why", help="Also list the workloads that each does not compute.")] = False,
    as_json: AsJson = False,
) -> None:
    """List every component, and why some cannot be used on this machine."""
    found, machine = discover(), detect()
    kinds = [kind] if kind else list(Kind)
    listing = {name: _entries(found, name, machine) for name in kinds}
    if as_json:
        problems = [{"plugin": problem.plugin, "why": problem.why} for problem in found.problems]
        say(json.dumps({**listing, "problems": problems}, indent=2, ensure_ascii=False))
        return
    for index, (name, entries) in enumerate(listing.items()):
        if index:
            say()
        _print(name, entries, why)
    if "workloads" in listing:
        say()
        lengths = [(name, " ".join(map(str, RANGES[name]))) for name in RANGES]
        print_table("ranges (--range NAME, all, custom)", ("name", "lengths"), lengths)
    if any(entry.get("aliases") for entries in listing.values() for entry in entries):
        say("a = b: b is another name of a")
    for problem in found.problems:
        say(f"broken plug-in {problem.plugin}: {problem.why}")


def _entries(found: Found, name: str, machine: Machine) -> list[dict[str, Any]]:
    if name == PLUGINS:
        loaded = [{**info.model_dump(), "usable": True, "reasons": []} for info in found.plugins]
        broken = [{"name": problem.plugin, "usable": False, "reasons": [problem.why]} for problem in found.problems]
        return loaded + broken
    registry = getattr(found.catalogue, name)
    entries = []
    for descriptor in registry:
        reasons = reasons_against(descriptor, machine)
        entry: dict[str, Any] = {
            "name": descriptor.name,
            "summary": descriptor.summary,
            "aliases": list(descriptor.aliases),
            "plugin": registry.origin(descriptor.name),
            "usable": not reasons,
            "reasons": list(reasons),
        }
        if isinstance(descriptor, Implementation | Backend):
            entry["limits"] = list(limits_of(descriptor))
        if isinstance(descriptor, WorkloadPreset):
            entry["members" if descriptor.members else "workload"] = _shape(descriptor)
        entries.append(entry)
    return entries


def _shape(preset: WorkloadPreset) -> str | list[str]:
    """Return the members of a set, or a preset's shape; its dtype is fixed, so the machine does not matter."""
    if preset.members:
        return list(preset.members)
    workload = validated(WorkloadRequest, dict(preset.fields)).resolve("float32")
    return f"{workload.label()} {workload.pattern.kind}"


def _print(name: str, entries: list[dict[str, Any]], why: bool) -> None:
    columns = ["name", "usable", "summary"] if name != PLUGINS else ["name", "usable", "distribution"]
    if why and name in ("implementations", "backends"):
        columns.insert(2, "limits")
    rows = [[_cell(entry, column) for column in columns] for entry in entries]
    if not any(row[1] != "yes" for row in rows):
        rows = [[*row[:1], *row[2:]] for row in rows]
        columns.remove("usable")
    print_table(name, columns, rows)
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        if not entry["usable"]:
            reasons.setdefault("; ".join(entry["reasons"]), []).append(entry["name"])
    for reason, names in reasons.items():
        say_folded(f"{', '.join(names)} cannot be used here: {reason}", "  ")


def _cell(entry: dict[str, Any], column: str) -> str:
    if column == "name":
        return " = ".join([entry["name"], *entry.get("aliases", ())])
    if column == "usable":
        return "yes" if entry["usable"] else "no"
    if column == "limits":
        return "; ".join(entry["limits"]) or "none"
    if column == "distribution":
        return " ".join(filter(None, (entry.get("distribution"), entry.get("version")))) or "-"
    shape = entry.get("workload") or ", ".join(entry.get("members", ()))
    return f"{entry['summary']} ({shape})" if shape else str(entry["summary"])
