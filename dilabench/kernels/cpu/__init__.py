"""Attention on a CPU: torch's own kernel, and dilabench's in C++."""
