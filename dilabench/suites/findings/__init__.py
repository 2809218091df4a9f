"""Functions that the findings of several suites share."""
