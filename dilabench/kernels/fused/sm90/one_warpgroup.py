"""What the Hopper forward kernels of one warpgroup are launched with: descriptors of tiles and tables of a group."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dilabench.kernels.fused.branch_group import BranchGroup
from dilabench.kernels.fused.results import Results
from dilabench.kernels.fused.row_layout import class_box, shared_arguments
from dilabench.kernels.fused.sm90.tile_walk import tile_descriptor
from dilabench.kernels.fused.tile_tables import tile_tables
from dilabench.kernels.launch_cache import Arguments, Launch
from dilabench.kernels.tuning import TileConfig, padded_dim


class Kernel(NamedTuple):
    """A kernel with the arguments that it has alone, and the names of those that all others have and it has not."""

    function: Any
    own: dict[str, Any]
    without: frozenset[str]


def group_launch(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: Results,
    group: BranchGroup,
    causal: bool,
    scale: float,
    config: TileConfig,
) -> Launch:
    """As `forward.group_launch`."""
    tables = tile_tables(group, config.block_m, config.block_n, causal, False, q.device)
    columns, rows = padded_dim(q.shape[-1]), {"q": config.block_m, "k": config.block_n, "v": config.block_n}

    def arguments(ragged: bool) -> Arguments:
        n_items = tables.items.shape[2]
        grid, shared = shared_arguments(q, k, n_items, group, q.shape[2], causal, scale, config)
        given = {name: value for name, value in shared.items() if name not in kernel.without}
        tiles = {
            f"{name}_desc": tile_descriptor(x, class_box(x, group.modulus), (rows[name], columns))
            for name, x in (("q", q), ("k", k), ("v", v))
        }
        more = {
            "out_ptr": results.out,
            "lse_ptr": results.lse,
            "mass_ptr": results.mass,
            "items_ptr": tables.items,
            "entries_ptr": tables.entries,
            "heads_ptr": tables.heads,
            "heads_per_kv": group.heads_per_kv,
            "RAGGED": ragged and not causal,
            "MERGE": results.merge,
            "COMPACT": results.compact,
            "launch_pdl": results.follows,
        }
        return grid, given | tiles | more | kernel.own

    kind = (*results.out.shape[2:], causal, config, *results.compiled_for, *group.compiled_for)
    return Launch(kernel.function, arguments, group.cuts_tiles(config.longest), kind)
