"""The version of dilabench, in a separate file: the package's own file imports `dilabench.api`, which imports all
others.
"""

__version__ = "0.2.0"
