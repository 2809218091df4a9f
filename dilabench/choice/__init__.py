"""Choice of the fastest implementation and backend of a workload: descriptors, measured cells, first use, rules."""
