"""`python -m dilabench`."""

from dilabench.cli import main

if __name__ == "__main__":
    main()
