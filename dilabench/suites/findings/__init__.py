"""What the findings of several suites share."""
