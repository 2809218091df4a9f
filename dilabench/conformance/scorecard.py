"""The scorecard: the checks of a component and their results."""

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import computed_field

from dilabench.engine.outcomes import Result
from dilabench.errors import ConfigError, DilabenchError, ExitCode, PluginError, exit_code_for, said
from dilabench.validation import Model


class Finding(Model):
    """One check. wrong: an output is wrong; failed: it raised, or broke a rule; skipped: it does not claim support, or
    this machine cannot run the check."""

    name: str
    result: Result
    detail: str = ""


class Scorecard(Model):
    """All findings of one component, about its package and about its behaviour."""

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
        """Return True if nothing is wrong or failed, and some behaviour was checked."""
        return self.exit_code is ExitCode.OK

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of them, those about the package first."""
        return (*self.package, *self.behaviour)

    @property
    def exit_code(self) -> ExitCode:
        """5 if an output is wrong, 4 if something failed, 8 if none of its behaviour could be checked."""
        results = {finding.result for finding in self.findings}
        tried = any(finding.result == "right" for finding in self.behaviour)
        return exit_code_for(wrong="wrong" in results, failed="failed" in results, nothing=not tried)

    def failures(self) -> Iterator[str]:
        """'name: detail' of every wrong or failed finding."""
        return (
            f"{finding.name}: {finding.detail}" for finding in self.findings if finding.result in ("wrong", "failed")
        )


class Listener:
    """Callbacks for progress; these do nothing."""

    def found(self, finding: Finding) -> None:
        """Called with the result of a check."""

    def verified(self, done: int, total: int, what: str) -> None:
        """Called with the number of verified cases, `what` being the last one; 0 at the start."""


class Findings(list[Finding]):
    """A list of findings; `listener` is called with each."""

    def __init__(self, listener: Listener | None = None) -> None:
        super().__init__()
        self.listener = listener or Listener()

    def add(self, name: str, result: Result, detail: str = "") -> None:
        """Append a finding."""
        self.append(Finding(name=name, result=result, detail=" ".join(detail.split())))
        self.listener.found(self[-1])

    def hold(self, name: str, problem: str | None, right: str = "") -> None:
        """Append a finding: failed with `problem`, or right with the detail `right` if there is none."""
        self.add(name, "failed" if problem else "right", problem or right)

    @contextmanager
    def tried(self, name: str) -> Iterator[None]:
        """Turn an exception of the block into a finding; a block that does not raise adds its findings."""
        try:
            yield
        except (PluginError, ConfigError) as error:
            self.add(name, "failed", str(error))
        except DilabenchError:
            raise
        # Code of the plug-in runs here.
        except Exception as error:  # noqa: BLE001
            self.add(name, "failed", said(error))
