"""What is asked of any thing's package: that it is registered cleanly, and that importing it does nothing else."""

from collections.abc import Iterable

from dilabench.conformance.fresh_import import ImportReport, import_reports
from dilabench.conformance.scorecard import Findings
from dilabench.plugins.descriptors import Backend, Implementation, Named, Timer
from dilabench.plugins.manager import Found
from dilabench.units import format_seconds
from dilabench.validation import targets_of

# Whose targets run in workers and may load torch; those of every other kind run where records are shown.
IN_WORKERS = (Implementation, Backend, Timer)
# Read in the main process, whatever names them.
LIGHT_FIELDS = frozenset({"sharding"})


def check_package(descriptor: Named, plugin: str, found: Found, findings: Findings) -> None:
    """Registration, what importing loads, network, side effects."""
    problems = [problem.why for problem in found.problems if problem.plugin == plugin]
    findings.hold("registration", "; ".join(problems) or None, f"by plug-in {plugin!r}")
    light, heavy = _modules(descriptor, found.modules[plugin])
    reports = import_reports(light, heavy)
    broken = "; ".join(f"{one.module}: {one.error}" for one in reports if one.error)
    spent = sum(one.lasted_ns for one in reports if one.module in light)
    loading = _problems((one for one in reports if one.module in light), "heavy")
    rule = f"{loading}; import it inside of the functions that need it, or `dilabench list` waits for it"
    lasted = f"{', '.join(light)} in {format_seconds(spent * 1e-9)}, nothing heavy"
    findings.hold("import", broken or (rule if loading else None), lasted)
    findings.hold("no network", _problems(reports, "network"), "no address was looked up or met at import")
    effects = _problems(reports, "effects")
    right = "no file, process, thread or setting at import"
    findings.hold("no side effects", effects, right)


def _modules(descriptor: Named, module: str) -> tuple[list[str], list[str]]:
    """Modules that must stay light, the one of the hooks first, and those that may load torch."""
    light, heavy = {module: None}, dict[str, None]()
    for name, target in targets_of(descriptor).items():
        if target is not None:
            (heavy if isinstance(descriptor, IN_WORKERS) and name not in LIGHT_FIELDS else light)[
                target.partition(":")[0]
            ] = None
    return list(light), [one for one in heavy if one not in light]


def _problems(reports: Iterable[ImportReport], what: str) -> str | None:
    problems = [f"importing {one.module}: {', '.join(getattr(one, what))}" for one in reports if getattr(one, what)]
    return "; ".join(problems) or None
