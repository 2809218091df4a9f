"""Attention on a CPU: torch's own kernel, and ours in C++."""
