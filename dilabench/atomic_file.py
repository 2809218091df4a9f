"""Writing a report so that a reader never sees half of one."""

import os
import tempfile
from pathlib import Path

from dilabench.errors import EnvironmentNotReady


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to `path` in one step: a full disk or a kill leaves the old file or none.

    Raises EnvironmentNotReady when the folder cannot be made or written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}-", encoding="utf-8", newline="\n", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # NamedTemporaryFile keeps others out; a report is meant to be read like any other file.
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise EnvironmentNotReady(
            f"{str(path)!r} cannot be written: {error.strerror or error}; choose another folder with -o"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
