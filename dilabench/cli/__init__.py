"""The command line. One file per command; nothing here imports torch."""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line with `argv` (sys.argv without the program by default) and leave with its exit code."""
    import gc

    # Imports, and a record, are a great many small objects without cycles: to look for garbage among them takes a third
    # of the time.
    gc.set_threshold(100_000, 50, 100)
    from dilabench.cli.app import app
    from dilabench.cli.arguments import spread
    from dilabench.cli.guard import end_by_signals, ignore_signals
    from dilabench.cli.terminal import own_streams

    own_streams()
    end_by_signals()
    try:
        app(args=spread(sys.argv[1:] if argv is None else argv), prog_name="dilabench")
    finally:
        ignore_signals()
