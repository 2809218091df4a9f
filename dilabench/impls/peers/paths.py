"""The search path of public projects that are not installed: `DILABENCH_PEERS=PATH[:PATH]`."""

import os
import sys
from pathlib import Path

from dilabench.errors import ConfigError

PEERS_VARIABLE = "DILABENCH_PEERS"


def search_peer_paths() -> None:
    """Let the folders that the variable names be imported from, after everything that is installed.

    Raises ConfigError for one that is no folder.
    """
    for text in filter(None, os.environ.get(PEERS_VARIABLE, "").split(os.pathsep)):
        path = Path(text).expanduser()
        if not path.is_dir():
            raise ConfigError(
                f"{PEERS_VARIABLE} names {text!r}, which is no folder; give the folders that hold the packages, with "
                f"{os.pathsep!r} between them (the clone of torchscale holds the package torchscale)"
            )
        if (found := str(path.resolve())) not in sys.path:
            sys.path.append(found)
