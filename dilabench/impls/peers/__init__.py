"""Attention of public projects, adapted to dilabench's contracts, so that it is verified and tabulated in the same way.

A project computes as its users run it; the descriptor says what an adapter adds or omits
(`dilabench.plugins.builtin.peers`). Each module imports its project inside `build`.
"""
