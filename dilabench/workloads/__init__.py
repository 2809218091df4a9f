"""Named workloads as data."""
