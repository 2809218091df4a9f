"""`python -m dilabench`."""

import os
import sys

try:
    folder = os.getcwd()
except OSError:
    # The folder was removed. `main` reports that; Python puts "" on the path instead.
    folder = ""
# Python puts the working folder first on the path; a random.py in there would be imported for the standard library's.
if not sys.flags.safe_path and sys.path and sys.path[0] == folder:
    del sys.path[0]

from dilabench.cli import main

if __name__ == "__main__":
    main()
