"""`--github-summary`: what a job of GitHub Actions shows on its page."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dilabench.atomic_file import open_to_append
from dilabench.errors import ConfigError, EnvironmentNotReady

VARIABLE = "GITHUB_STEP_SUMMARY"


GithubSummary = Annotated[bool, typer.Option("--github-summary", help="Show it on the page of the GitHub Actions job.")]


def require_github() -> None:
    """Raise ConfigError outside of GitHub Actions."""
    if not os.environ.get(VARIABLE):
        raise ConfigError(
            f"--github-summary: {VARIABLE} is not set, so this is no job of GitHub Actions; `-f pull-request` (run, "
            "report) and `-f markdown` (compare, check) print the same"
        )


def append_summary(text: str) -> None:
    """Add a text to the summary of the job. Raises EnvironmentNotReady when its file cannot be written."""
    path = Path(os.environ[VARIABLE])
    try:
        with open_to_append(path) as file:
            file.write((text + "\n").encode())
    except OSError as error:
        raise EnvironmentNotReady(f"{VARIABLE} {str(path)!r} cannot be written: {error.strerror}") from None
