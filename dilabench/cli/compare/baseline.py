"""`dilabench baseline`: names for the runs that a gate compares with."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from dilabench.cli.app import guarded
from dilabench.cli.options import AsJson
from dilabench.cli.terminal import note, print_items, say
from dilabench.errors import ConfigError

baseline_app = typer.Typer(
    help="Name runs as a baseline, list the names, remove one.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The baseline's name, for example main.")]


def save(
    name: Name,
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Files, folders or run ids (default: the latest).")
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Add sessions of the same code to a baseline that exists.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the runs that the name had by these.")] = False,
) -> None:
    """Give runs a name; files that are not in the store yet are copied there. Five sessions make a gate on time."""
    from dilabench.comparison.across import refuse_other_machine
    from dilabench.comparison.comparison import is_measured
    from dilabench.store.lookup import Store

    if add and replace:
        raise ConfigError("--add keeps the runs that the name has and --replace drops them; give one of the two")
    store = Store(tell=note)
    texts = runs or ["latest"]
    records = [record for text in texts for record in store.records(text)]
    old = store.baselines.all().get(name)
    kept = [store.archive.load(run) for run in old.runs] if old and add else []
    for record in records:
        if not any(is_measured(row) for row in record.rows):
            raise ConfigError(f"run {record.run_id} has no measured case; a baseline needs one")
        refuse_other_machine([*kept, records[0]], [record], ConfigError)
    files = [store.archive.add(record) for record in records]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    saved = store.baselines.save(name, files, now, add=add, replace=replace)
    say(f"baseline {name} holds {', '.join(saved.runs)}")


def list_baselines(as_json: AsJson = False) -> None:
    """Show the baselines and their runs."""
    from dilabench.report.columns import Column
    from dilabench.store.lookup import Store

    store = Store(tell=note)
    known = store.baselines.all()
    if as_json:
        say(json.dumps({name: baseline.model_dump(mode="json") for name, baseline in known.items()}, indent=2))
        return
    if not known:
        say(f"no baselines in {store.root}; `dilabench baseline save NAME` makes one of the latest run")
        return
    stored = set(store.archive.names())

    def files(runs: Sequence[str]) -> str:
        gone = sum(run not in stored for run in runs)
        return ", ".join(runs) + (f" ({gone} gone)" if gone else "")

    columns = (
        Column(name="name", cell=lambda item: item[0], right=False, spare=None),
        Column(name="runs", cell=lambda item: len(item[1].runs), spare=None),
        Column(name="saved", cell=lambda item: item[1].saved_at, right=False, spare=None),
        Column(name="files", cell=lambda item: files(item[1].runs), right=False, spare=None),
    )
    print_items(None, columns, known.items())


def rm(name: Name) -> None:
    """Forget a baseline's name. Its runs stay in the store."""
    from dilabench.store.lookup import Store

    removed = Store().baselines.remove(name)
    say(f"baseline {name} removed; the store keeps {', '.join(removed.runs)}")


for _name, _command in (("save", save), ("list", list_baselines), ("rm", rm)):
    baseline_app.command(_name)(guarded(_command))
