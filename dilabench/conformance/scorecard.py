"""The scorecard: what was asked of a thing, and how it did."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import computed_field

from dilabench.engine.worker.outcomes import Result
from dilabench.errors import ConfigError, DilabenchError, ExitCode, PluginError, exit_code_for, said
from dilabench.validation import Model


class Finding(Model):
    """One thing that was asked. wrong: it gives what it must not; failed: it raised, or breaks a rule; skipped: it does
    not claim to do that, or this machine cannot try."""

    name: str
    result: Result
    detail: str = ""


class Scorecard(Model):
    """All findings of one thing: those about its package, and those about what it does."""

    name: str
    kind: str
    plugin: str
    version: str
    device: str
    package: tuple[Finding, ...]
    behaviour: tuple[Finding, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Nothing is wrong or failed, and what it does was tried."""
        return self.exit_code is ExitCode.OK

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, those about the package first."""
        return (*self.package, *self.behaviour)

    @property
    def exit_code(self) -> ExitCode:
        """5 when an output is wrong, 4 when something failed, 8 when nothing of what it does could be tried."""
        results = {one.result for one in self.findings}
        tried = any(one.result == "right" for one in self.behaviour)
        return exit_code_for(wrong="wrong" in results, failed="failed" in results, nothing=not tried)

    def failures(self) -> Iterator[str]:
        """'name: detail' of everything that is wrong or failed."""
        return (f"{one.name}: {one.detail}" for one in self.findings if one.result in ("wrong", "failed"))


class Listener:
    """Hears of the work while it goes on; here it says nothing."""

    def found(self, finding: Finding) -> None:
        """Something was asked, with this result."""

    def verified(self, done: int, total: int, what: str) -> None:
        """So many of all cases were verified, `what` last; 0 when they begin."""


class Findings(list[Finding]):
    """Findings as they are made; `listener` hears of each."""

    def __init__(self, listener: Listener | None = None) -> None:
        super().__init__()
        self.listener = listener or Listener()

    def add(self, name: str, result: Result, detail: str = "") -> None:
        """Keep a finding."""
        self.append(Finding(name=name, result=result, detail=" ".join(detail.split())))
        self.listener.found(self[-1])

    def hold(self, name: str, problem: str | None, right: str = "") -> None:
        """Right, with what is to be said of that, where there is no problem; else failed."""
        self.add(name, "failed" if problem else "right", problem or right)

    @contextmanager
    def tried(self, name: str) -> Iterator[None]:
        """What the block raises is a finding. Where it does not, the block adds its own."""
        try:
            yield
        except (PluginError, ConfigError) as error:
            self.add(name, "failed", str(error))
        except DilabenchError:
            raise
        # Code of the plug-in runs here.
        except Exception as error:  # noqa: BLE001
            self.add(name, "failed", said(error))
