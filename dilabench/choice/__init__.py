"""Which way of computing a workload is the fastest: descriptors, measured cells, first use, rules."""
