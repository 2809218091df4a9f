"""Attention over several ranks, one algorithm per file, each exact against one device.

`build(workload, context)` gives a function of *local* shards [B, N_local, H, D] (packed: [T_local, H, D]); its
`shards` say which positions each rank holds. `dilabench.distributed.whole` puts whole tensors around such a function.
"""
