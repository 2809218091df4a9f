"""`python -m dilabench`."""

import os
import sys

# Python puts the working folder first on the path; a random.py in there would be imported for the standard library's.
try:
    _folder = os.getcwd()
except FileNotFoundError:
    # It was removed: `main` says so.
    _folder = ""
if not sys.flags.safe_path and sys.path and sys.path[0] == _folder:
    del sys.path[0]
    # Modules that `-m` itself needs were imported before this line.
    _files = (getattr(sys.modules.get(name), "__file__", None) or "" for name in sys.stdlib_module_names)
    _taken = [path for path in _files if os.path.dirname(path.removesuffix(f"{os.sep}__init__.py")) == _folder]
    if _taken and _folder != os.path.dirname(os.__file__):
        sys.stderr.write(
            f"error: Python imported {', '.join(sorted(_taken))} in place of its own module; start the command "
            "`dilabench`, or `python -P -m dilabench`, which imports nothing from the working folder\n"
        )
        raise SystemExit(3)

from dilabench.cli import main

if __name__ == "__main__":
    main()
