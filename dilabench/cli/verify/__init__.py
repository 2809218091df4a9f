"""`dilabench verify`."""
