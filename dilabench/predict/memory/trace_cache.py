"""A cache of traced answers: in the process and, for what dilabench ships, in the cache folder. One trace per case."""

import contextlib
import hashlib
import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

from dilabench.cache_folder import cache_folder

PACKAGE = Path(__file__).parents[2]
# What decides how much an implementation allocates.
SOURCES = ("backends", "distributed", "engine/call", "engine/trace", "impls", "kernels", "patterns", "workload")


class TraceCache:
    """Answers by key. A file that cannot be read or written is no error: then a case is traced again."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[str, Any]] | None = None

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer, if there is one."""
        if self._answers is None:
            self._answers = _read(_file())
        return self._answers.get(key)

    def put(self, key: str, answer: dict[str, Any], lasting: bool) -> None:
        """Keep an answer; one that is `lasting` also for later processes, unless it is that there is none."""
        assert self._answers is not None
        self._answers[key] = answer
        if not lasting or "why" in answer:
            return
        with contextlib.suppress(OSError):
            path = _file()
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                for old in path.parent.glob("*.jsonl"):
                    old.unlink()
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, answer]) + "\n")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    answers: dict[str, dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return answers
    for line in lines:
        # Another process may be writing the last one.
        with contextlib.suppress(ValueError):
            key, answer = json.loads(line)
            answers[key] = answer
    return answers


def _file() -> Path:
    return cache_folder() / "memory" / f"{_sources_hash()}.jsonl"


@cache
def _sources_hash() -> str:
    """Sixteen hex digits over torch's version and the sources that a trace runs."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
