"""Named baselines: `baselines.toml`, a name for one or more stored runs. No torch.

Several runs under one name are the sessions of the baseline; a gate on time needs five.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from dilabench.atomic_file import read_file
from dilabench.errors import ConfigError, unknown_name
from dilabench.store.archive import locked, unreadable, write_whole
from dilabench.validation import Model, parsed_toml

FILENAME = "baselines.toml"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


class Baseline(Model):
    """A name's runs, as file names of the archive, oldest first, and when it was last changed (ISO 8601)."""

    runs: tuple[str, ...] = Field(min_length=1)
    saved_at: str


class Baselines:
    """The baselines of a store. Every change is read, made and written under one lock."""

    def __init__(self, root: Path) -> None:
        self.path = root / FILENAME

    def all(self) -> dict[str, Baseline]:
        """The baselines by name.

        Raises ConfigError when the file cannot be understood, EnvironmentNotReady when it cannot be read.
        """
        try:
            tables = parsed_toml(read_file(self.path).decode())
            return {name: Baseline.model_validate(table) for name, table in tables.items()}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise unreadable(self.path, error) from None
        except (ValueError, RecursionError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"{str(self.path)!r} cannot be understood ({first}); repair it, or remove it and save the baselines "
                "again (the runs themselves are kept)"
            ) from None

    def get(self, name: str) -> Baseline:
        """A baseline by name; raises ConfigError with the nearest names when there is none."""
        known = self.all()
        if name not in known:
            raise unknown_name("baseline", name, known, "dilabench baseline list")
        return known[name]

    def save(self, name: str, runs: Sequence[str], now: str, *, add: bool = False, replace: bool = False) -> Baseline:
        """Give runs a name. A name that exists is kept unless runs are added to it or it is replaced.

        Raises ConfigError for a name that is taken or impossible, EnvironmentNotReady when it cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a baseline name; use letters, digits, '-', '_' and '.'")
        if name == "latest":
            raise ConfigError("'latest' is not a baseline name: it means the newest run; use another")
        with locked(self.path):
            known = self.all()
            old = known.get(name)
            if old and not (add or replace):
                raise ConfigError(
                    f"baseline {name!r} exists (saved {old.saved_at}, number of runs: {len(old.runs)}); "
                    "use --add for more sessions of the same code, or --replace to start over"
                )
            earlier = old.runs if old and add else ()
            saved = Baseline(runs=tuple(dict.fromkeys([*earlier, *runs])), saved_at=now)
            self._write({**known, name: saved})
        return saved

    def remove(self, name: str) -> Baseline:
        """Forget a name; its runs stay in the archive. Raises ConfigError when there is no such name."""
        with locked(self.path):
            known = self.all()
            if name not in known:
                raise unknown_name("baseline", name, known, "dilabench baseline list")
            removed = known.pop(name)
            self._write(known)
        return removed

    def _write(self, baselines: Mapping[str, Baseline]) -> None:
        text = "".join(_table(name, baseline.model_dump(mode="json")) for name, baseline in sorted(baselines.items()))
        write_whole(self.path, text.encode(), replace=True)


def _table(name: str, fields: Mapping[str, Any]) -> str:
    """A TOML table; its texts and lists of texts are written as in JSON."""
    # TOML has no surrogate pairs, which JSON would write for letters beyond 16 bits.
    as_text = partial(json.dumps, ensure_ascii=False)
    lines = (f"{key} = {as_text(value)}\n" for key, value in fields.items())
    return f"[{as_text(name)}]\n{''.join(lines)}\n"
