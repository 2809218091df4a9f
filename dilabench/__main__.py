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

from dilabench.cli import main

if __name__ == "__main__":
    main()
