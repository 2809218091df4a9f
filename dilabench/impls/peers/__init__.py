"""Attention of public projects, adapted to our contracts so that it stands in the same tables, verified the same way.

A project computes as its users have it; what an adapter adds or leaves out is said in its descriptor
(`dilabench.plugins.builtin.peers`). Each module imports its project inside `build`.
"""
