"""Suite `block-sparse`: do time and memory fall with the share of blocks computed, and where does that begin to pay?"""

from dilabench.patterns.block_sparse import BlockSparsePattern
from dilabench.plugins.descriptors import Implementation
from dilabench.record import PlannedCase
from dilabench.request import RunRequest
from dilabench.suites.planner import Planner, as_dense
from dilabench.workload.spec import WorkloadRequest

KIND: str = BlockSparsePattern.model_fields["kind"].default
SPARSITIES = (0.5, 0.75, 0.9, 0.95, 0.98)
BLOCK_SIZES = {"cpu": (128,), "cuda": (64, 128, 256)}
SHAPE = {
    "cpu": {"batch_size": 1, "seq_len": 8192, "num_heads": 4, "head_dim": 64},
    "cuda": {"batch_size": 1, "seq_len": 32768, "num_heads": 16, "head_dim": 128},
}


def expand(_request: RunRequest, planner: Planner) -> tuple[PlannedCase, ...]:
    """Every sparsity and block size of one shape, with full attention through a flash kernel as the yardstick.

    A sparsity, block size or mask file that is named is the only one. Shapes with branches get the mask laid over each
    branch's rows. With `--nproc` the rows over ranks stand beside those of one device.
    """
    device = planner.machine.device
    implementations = planner.implementations(planner.where(_masked_or_yardstick))
    cases: list[PlannedCase] = []
    for base in planner.workload_requests([SHAPE[device]]):
        masked = base.model_copy(update={"pattern": KIND})
        for implementation in implementations:
            on_one = implementation.supports.max_world_size == 1
            there = planner.asking(nproc=1) if on_one else planner
            if implementation.supports.only_dense:
                cases += there.plan(implementation, as_dense(base), role="yardstick")
                continue
            for point in _points(masked, BLOCK_SIZES[device]):
                cases += there.plan(implementation, point)
    return tuple(cases)


def _masked_or_yardstick(one: Implementation) -> bool:
    """Whatever computes block masks, on any number of ranks, and full attention on one device."""
    full = one.supports.only_dense and one.supports.max_world_size == 1
    return one.takes == "heads" and (full or KIND in one.supports.patterns)


def _points(base: WorkloadRequest, block_sizes: tuple[int, ...]) -> list[WorkloadRequest]:
    """The request with every block size and sparsity that it does not name itself."""
    named = base.model_fields_set
    from_file = base.pattern_field("mask_file")
    sizes = (base.pattern_field("block_size"),) if "block_size" in named or from_file else block_sizes
    sparsities = (base.pattern_field("sparsity"),) if "sparsity" in named or from_file else SPARSITIES
    return [
        base.model_copy(update={"block_size": size, "sparsity": sparsity}) for size in sizes for sparsity in sparsities
    ]
