"""Dense attention kernels, one per file, each with `attend` and `attend_backward` (dilabench/contracts.py)."""
