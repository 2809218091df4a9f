"""What is computed: shape, dtype, mode and pattern; named workloads and ranges."""
