"""The questions that dilabench itself asks, as data."""

from dilabench.plugins.descriptors import Suite

SUITES: tuple[Suite, ...] = (
    Suite(
        "quick",
        "does it work, how fast is it roughly: 1K, 4K and 16K tokens",
        "dilabench.suites.overview.quick:expand",
        analysis="dilabench.suites.overview.findings:analyse",
        budget_s=50.0,
    ),
    Suite(
        "implementations",
        "which implementation is fastest and smallest",
        "dilabench.suites.overview.implementations:expand",
        analysis="dilabench.suites.overview.findings:analyse",
    ),
    Suite(
        "range",
        "how time and memory grow with length, and where one implementation overtakes another",
        "dilabench.suites.range.cases:expand",
        analysis="dilabench.suites.range.findings:analyse",
    ),
    Suite(
        "backends",
        "which dense kernel and dtype this device wants, for full and for dilated attention",
        "dilabench.suites.backends.cases:expand",
        analysis="dilabench.suites.backends.findings:analyse",
    ),
    Suite(
        "optimization",
        "what pattern cache, buffer pool, CUDA graph and torch.compile bring, alone and together",
        "dilabench.suites.optimization.cases:expand",
        analysis="dilabench.suites.optimization.findings:analyse",
        # Host time: launches, allocations and tables are what most of these optimizations are about.
        timing="wall",
    ),
    Suite(
        "block-sparse",
        "how time and memory fall with the share of blocks computed, and from which density on that pays",
        "dilabench.suites.block_sparse.cases:expand",
        analysis="dilabench.suites.block_sparse.findings:analyse",
    ),
    Suite(
        "ring",
        "what several ranks bring against one device: speed-up, efficiency, bytes moved",
        "dilabench.suites.ring.cases:expand",
        analysis="dilabench.suites.ring.findings:analyse",
    ),
    Suite(
        "distributed",
        "how each parallel implementation scales over ranks, at fixed length and at fixed length per rank",
        "dilabench.suites.distributed.cases:expand",
        analysis="dilabench.suites.distributed.findings:analyse",
    ),
    Suite(
        "extreme",
        "how long a sequence can get: the largest length that runs, found by real runs",
        "dilabench.suites.extreme.cases:expand",
        follow_up="dilabench.suites.extreme.cases:follow_up",
        analysis="dilabench.suites.extreme.findings:analyse",
    ),
    Suite(
        "billion",
        "2^30 tokens, really computed: resident on one device or over ranks, else streamed in pieces",
        "dilabench.suites.billion.cases:expand",
        analysis="dilabench.suites.billion.findings:analyse",
        projections="dilabench.suites.billion.findings:project",
    ),
    Suite(
        "all",
        "everything that this machine can run, the most telling answers first",
        "dilabench.suites.all:expand",
        follow_up="dilabench.suites.all:follow_up",
        budget_s=900.0,
    ),
)
