"""`dilabench plugin check`: the conformance suite."""

import json
import textwrap
from typing import Annotated

import typer

from dilabench.cli.author.new import Kind
from dilabench.cli.options import AsJson, Device, StrictPlugins, discovered
from dilabench.cli.run.progress_bar import CheckedLines
from dilabench.cli.terminal import WIDE, say
from dilabench.cli.verify.everything import MARKS
from dilabench.errors import ExitCode, gravest
from dilabench.machine import detect
from dilabench.plugins.boundary import standard_output
from dilabench.units import counted, printable

ENDINGS = {ExitCode.OK: "conforms", ExitCode.NOTHING_MEASURED: "COULD NOT BE TRIED HERE"}


def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `dilabench list` shows.")],
    kind: Annotated[
        Kind | None, typer.Option("--kind", "-k", help="The kind, if several things have this name.")
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
    strict_plugins: StrictPlugins = False,
) -> None:
    """Run every conformance check for this kind of component and print a scorecard.

    Every workload that it claims is verified in every dtype, mode and layout. Its package must import quickly, without
    network access or side effects. ✓ right, ✗ wrong, ! failed, - not claimed, or not possible here.

    Exit codes: 0 conforms, 4 something failed, 5 an output is wrong, 8 no check could run here.
    """
    from dilabench.conformance.component import registries_with, scorecard
    from dilabench.conformance.scorecard import Finding, Listener, Scorecard
    from dilabench.units import output_width

    found, machine = discovered(strict_plugins), detect(device or "auto")
    cards: list[Scorecard] = []
    width = output_width(standard_output(), WIDE)

    class PrintedFindings(Listener):
        """Findings line by line, and on stderr how far the verification is."""

        lines: CheckedLines | None = None

        def found(self, finding: Finding) -> None:
            if self.lines:
                self.lines.spoke()
            if not as_json:
                line = f"  {MARKS[finding.result]} {finding.name}" + (f": {finding.detail}" if finding.detail else "")
                say(textwrap.fill(printable(line), width, subsequent_indent="    ", break_long_words=False))

        def verified(self, done: int, total: int, what: str) -> None:
            if not done:
                say(f"verifying {counted(total, 'case')} ...", err=True)
                self.lines = CheckedLines(total)
            elif self.lines:
                self.lines.checked(done, what)

    for registry in registries_with(name, found.catalogue, kind):
        if not as_json:
            say(f"{getattr(found.catalogue, registry).kind} {name} on {machine.device}")
        cards.append(scorecard(registry, name, found, machine, PrintedFindings()))
    if as_json:
        say(json.dumps([card.model_dump(mode="json") for card in cards], indent=2, ensure_ascii=False))
    for card in cards:
        counts = [sum(finding.result == result for finding in card.findings) for result in MARKS]
        ended = ", ".join(f"{count} {result}" for count, result in zip(counts, MARKS, strict=True))
        say(f"{card.kind} {card.name}: {ENDINGS.get(card.exit_code, 'DOES NOT CONFORM')} ({ended})", err=as_json)
    raise typer.Exit(gravest(card.exit_code for card in cards))
