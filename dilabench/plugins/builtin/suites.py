"""dilabench's suites and the options of each, as data."""

from typing import Literal

from pydantic import AliasChoices, Field

from dilabench.plugins.axis import DENSITY, RANKS
from dilabench.plugins.descriptors import Suite
from dilabench.validation import Model, Size, Sizes


class NoOptions(Model):
    """The options of a suite that has none."""


class RingOptions(Model):
    """Options over ranks. Ranks cut whole tensors and join results outside the timed call, or inside it."""

    sharding: Literal["inside", "outside"] = Field(
        "outside", description="Cutting for ranks inside or outside (default) the timed call."
    )


class LimitedMemory(Model):
    """The options of suites that search up to the end of the memory."""

    memory_limit: Size | None = Field(None, description="Bytes that a case may allocate: 512M, 8G.")


class ExtremeOptions(LimitedMemory):
    """The longest length to try, and ways to reach longer ones, each of which gets separate rows."""

    max_seq_length: Size = Field(
        2**20,
        validation_alias=AliasChoices("max_seq_length", "max_seq_len"),
        description="Longest sequence that the search may try (default 1M).",
    )
    gradient_checkpointing: bool = Field(False, description="Search with recomputation in backward, too.")
    chunked: bool = Field(False, description="Search with queries in chunks of whole segments, too.")
    offload: bool = Field(False, description="Search with inputs in host memory, in chunks, too.")


class BillionOptions(LimitedMemory):
    """The length of the one sequence."""

    tokens: Size = Field(2**30, description="Tokens of the sequence (default 2^30 = 1G).")


class DecodeOptions(Model):
    """The batches to measure."""

    batches: Sizes = Field((), description="Batch sizes to measure, one after another: 1,16,64.")


class ModelOptions(Model):
    """The form of the batch."""

    packed: bool = Field(False, description="Pack documents of random lengths into one row (median 1K tokens).")
    padded: bool = Field(False, description="Pad a batch of sequences of random lengths (4 if no batch_size is set).")


class ChoiceOptions(Model):
    """The number of drawn workloads."""

    shapes: Size = Field(200, description="Shapes to draw (default 200).")


SUITES: tuple[Suite, ...] = (
    Suite(
        "quick",
        "does it work, how fast is it roughly: 1K, 4K and 16K tokens",
        "dilabench.suites.overview:quick",
        analysis="dilabench.suites.overview:analyse",
        only_plots=True,
        budget_s=55.0,
        # Thirty slots of a call of 30 ms: with twenty, 4 % between the winners at 4K is mostly undecided.
        sampling_s=1.0,
        priority=60,
        options=NoOptions,
    ),
    Suite(
        "implementations",
        "which implementation is fastest and smallest",
        "dilabench.suites.overview:implementations",
        analysis="dilabench.suites.overview:analyse",
        only_plots=True,
        priority=50,
        options=NoOptions,
        tunes=True,
    ),
    Suite(
        "range",
        "how time and memory grow with length, and where one implementation overtakes another",
        "dilabench.suites.range.cases:expand",
        analysis="dilabench.suites.range.findings:analyse",
        priority=20,
        options=NoOptions,
    ),
    Suite(
        "backends",
        "which dense kernel and dtype this device wants, for full and for dilated attention",
        "dilabench.suites.backends:expand",
        analysis="dilabench.suites.backends:analyse",
        reads_catalogue=True,
        priority=30,
        options=NoOptions,
    ),
    Suite(
        "optimization",
        "what pattern cache, buffer pool, CUDA graph and torch.compile bring, alone and together",
        "dilabench.suites.optimization:expand",
        analysis="dilabench.suites.optimization:analyse",
        # Host time, because most of these optimizations concern launches, allocations and tables.
        timing="wall",
        priority=10,
        options=NoOptions,
    ),
    Suite(
        "decode",
        "queries that are the last rows of a cache: one token, a few, a chunk, against the rate of a copy",
        "dilabench.suites.decode:expand",
        analysis="dilabench.suites.decode:analyse",
        # Calls are short: caches take longer to make than to read.
        sampling_s=1.0,
        priority=5,
        options=DecodeOptions,
    ),
    Suite(
        "model",
        "how much faster a model trains, prefills or generates, and how much of its step is attention",
        "dilabench.suites.model:expand",
        analysis="dilabench.suites.model:analyse",
        # A user waits for the wall time: a step launches hundreds of kernels.
        timing="wall",
        budget_s=600.0,
        options=ModelOptions,
        by_name=True,
    ),
    Suite(
        "block-sparse",
        "how time and memory fall with the share of pairs computed, and from which density on that pays",
        "dilabench.suites.block_sparse.cases:expand",
        analysis="dilabench.suites.block_sparse.findings:analyse",
        aliases=("sparse",),
        axis=DENSITY,
        options=NoOptions,
    ),
    Suite(
        "field",
        "public projects against dilabench, each on the workloads it computes, and how to install missing ones",
        "dilabench.suites.field.cases:expand",
        analysis="dilabench.suites.field.findings:analyse",
        reads_catalogue=True,
        options=NoOptions,
    ),
    Suite(
        "ring",
        "what several ranks bring against one device: speed-up, efficiency, bytes moved",
        "dilabench.suites.ring.cases:expand",
        analysis="dilabench.suites.ring.findings:analyse",
        axis=RANKS,
        reads_catalogue=True,
        options=RingOptions,
    ),
    Suite(
        "distributed",
        "how each parallel implementation scales over ranks, at fixed length and at fixed length per rank",
        "dilabench.suites.distributed.cases:expand",
        analysis="dilabench.suites.distributed.findings:analyse",
        axis=RANKS,
        reads_catalogue=True,
        options=RingOptions,
    ),
    Suite(
        "extreme",
        "how long a sequence can get: the largest length that runs, found by real runs",
        "dilabench.suites.extreme.cases:expand",
        follow_up="dilabench.suites.extreme.cases:follow_up",
        analysis="dilabench.suites.extreme.findings:analyse",
        reads_catalogue=True,
        priority=40,
        options=ExtremeOptions,
    ),
    Suite(
        "choice",
        "how far the library's automatic choice is from the fastest of its ways, on shapes drawn at random",
        "dilabench.suites.choice.cases:expand",
        follow_up="dilabench.suites.choice.cases:follow_up",
        analysis="dilabench.suites.choice.findings:analyse",
        reads_catalogue=True,
        aliases=("regret",),
        # Thirty slots show a regret of 1.1, and there are many shapes.
        sampling_s=0.3,
        far_slower=3.0,
        options=ChoiceOptions,
        takes_the_rest=True,
        deals=True,
    ),
    Suite(
        "billion",
        "one sequence of 2^30 tokens: on one device the longest part that runs, over ranks all of it",
        "dilabench.suites.billion:expand",
        follow_up="dilabench.suites.billion:follow_up",
        analysis="dilabench.suites.extreme.findings:analyse",
        reads_catalogue=True,
        options=BillionOptions,
        takes_the_rest=True,
    ),
    Suite(
        "all",
        "everything that this machine can run, the most telling answers first",
        "dilabench.suites.all:expand",
        follow_up="dilabench.suites.all:follow_up",
        budget_s=900.0,
    ),
)
