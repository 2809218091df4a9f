"""Measurements: cases, outcomes with raw samples, and the run record that holds them.

Raw integers only (nanoseconds, bytes); everything else is derived in `dilabench.stats` and rounded in reporters.
The JSON form of RunRecord is the one file format; its JSON Schema is docs/reference/run-record.schema.json.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field

from dilabench.choice.descriptors import Role as Role
from dilabench.choice.descriptors import Takes as Takes
from dilabench.machine import GpuInfo as GpuInfo
from dilabench.metadata import NOTES
from dilabench.metadata import Note as Note
from dilabench.record.samples import NO_SAMPLES as NO_SAMPLES
from dilabench.record.samples import Slot as Slot
from dilabench.record.samples import SlotColumns, Slots, Times
from dilabench.record.verification import Check as Check
from dilabench.record.verification import CheckName as CheckName
from dilabench.record.verification import Verification as Verification
from dilabench.validation import Model, Several, content_hash
from dilabench.workload.spec import Workload, WorkloadRequest

# It rises with every change that an older version cannot read, such as a new key or a new word (`store.migrations`).
SCHEMA_VERSION = "1.3"
# The time of a row in every output (`comparison.view`).
ESTIMATOR = "median of all samples"

Stage = Literal["build", "verify", "kernels", "warmup", "time", "memory", "worker"]
Part = Literal["whole", "computation", "communication"]
Procedure = Literal["interleaved", "isolated"]
MemorySource = Literal["allocator", "resident_set", "process_peak"]
# unsupported: the implementation, the backend or the machine cannot. not_applicable: the optimization has no effect
# here. does_not_fit: predicted, before anything ran. out_of_memory: a real run ran out, in a search for the longest
# length. budget: it was used up. unusable_optimization: it cannot be used for this function. far_slower: the suite
# searches the fastest, and another verified case of the workload is that many times as fast.
SkipCode = Literal[
    "unsupported", "not_applicable", "does_not_fit", "out_of_memory", "budget", "unusable_optimization", "far_slower"
]
# wrong_output: a check of its output failed. backend_not_proven: no kernel of the claimed backend ran. exception: its
# code raised. crash: its process died. verification_timeout: its verification was not finished in time. peer_lost: a
# rank missed another. no_samples: its timer cannot time it.
FailureCode = Literal[
    "wrong_output",
    "backend_not_proven",
    "exception",
    "crash",
    "timeout",
    "verification_timeout",
    "out_of_memory",
    "peer_lost",
    "out_of_step",
    "no_samples",
]


class Optimizations(Model):
    """The optimizations around an implementation; size zero or false means off.

    `query_chunk`: tokens of a sequence that are processed at a time. `offload_inputs`: inputs and results stay in host
    memory, a chunk at a time on the device. `stream_tokens`: of old records. `sharding_inside`: over ranks, each call
    begins and ends with whole tensors on every rank; otherwise with shards. `tiles`: tile shapes of an implementation's
    kernels, named as it names them; empty for its defaults. Fields of another version of dilabench are kept and shown;
    a case that has any is never measured (`unknown`).
    """

    model_config = ConfigDict(extra="allow")

    pattern_cache_entries: int = Field(default=64, ge=0)
    buffer_pool_bytes: int = Field(default=0, ge=0)
    cuda_graph: bool = False
    compile: bool = False
    gradient_checkpointing: bool = False
    query_chunk: int = Field(default=0, ge=0)
    offload_inputs: bool = False
    stream_tokens: int = Field(default=0, ge=0)
    sharding_inside: bool = False
    tiles: str = ""

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of fields that this version does not know."""
        return tuple(self.model_extra or ())


class Case(Model):
    """One row: implementation x backend x workload x optimizations x world size, all of them effective values."""

    implementation: str
    backend: str | None = None
    workload: Workload
    optimizations: Optimizations = Optimizations()
    world_size: int = Field(default=1, ge=1)

    def __copy__(self) -> Self:
        """A copy without the hashes, because `model_copy` then changes its fields."""
        copied = super().__copy__()
        for name in ("case_id", "group_id"):
            copied.__dict__.pop(name, None)
        return copied

    @cached_property
    def case_id(self) -> str:
        """Content hash; equal in two records exactly when the same thing was to be computed."""
        content = self.model_dump(mode="json", exclude_defaults=True)
        # `kind` is a default of its pattern, yet it distinguishes patterns.
        content["workload"]["pattern"]["kind"] = self.workload.pattern.kind
        return content_hash(content)

    @cached_property
    def group_id(self) -> str:
        """Hash of the case without implementation and backend: cases of one workload group may be compared."""
        return content_hash(self.model_dump(mode="json", exclude={"implementation", "backend", "optimizations"}))


class Skipped(Model):
    """A case that cannot run here, or was skipped by the budget. Programs decide on `code`; `why` is for people."""

    status: Literal["skipped"] = "skipped"
    code: SkipCode
    why: str


class PlannedCase(Model):
    """A case with the user's request and the suite's labels; `skip` is its outcome if it cannot run here.

    `role`: its implementation's, or 'yardstick' if it computes another function than the ranked rows. `procedure`:
    interleaved with its workload's other cases, or isolated: in its own process, one set of inputs, sampled rows
    verified, at most `memory_limit_bytes` allocated. `labels`: of `dilabench.metadata`, or a plug-in's ('plugin:key').
    `source`: the plug-in's package of its implementation or backend ('my-attention 1.0'), if any.
    """

    case: Case
    source: str | None = None
    role: Role = "method"
    takes: Takes = "heads"
    requested_backend: str | None = None
    requested_workload: WorkloadRequest | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    procedure: Procedure = "interleaved"
    memory_limit_bytes: int | None = None
    skip: Skipped | None = None

    def isolated(self, memory_limit_bytes: int | None) -> "PlannedCase":
        """The same, to be measured alone within a memory limit."""
        return self.model_copy(update={"procedure": "isolated", "memory_limit_bytes": memory_limit_bytes})


class Timing(Model):
    """All samples that one timer took of one case."""

    timer: str
    proves: str
    slots: Slots
    warmup_ns: Times = ()

    @property
    def columns(self) -> SlotColumns:
        """The slots by column."""
        return self.slots if isinstance(self.slots, SlotColumns) else SlotColumns(self.slots)

    @property
    def samples_ns(self) -> Sequence[int]:
        """The samples of all slots, in the order taken."""
        return self.columns.samples_ns

    @property
    def rank_medians_ns(self) -> tuple[float, ...]:
        """The median of each rank, in the order of ranks; empty for one device and for records without them."""
        slots = [ranks for ranks in self.columns.column("rank_samples_ns") if ranks]
        return tuple(median(chain.from_iterable(samples)) for samples in zip(*slots, strict=True))

    @property
    def has_samples(self) -> bool:
        """Whether any sample was taken."""
        return len(self.columns.samples_ns) > 0


class Diagnostic(Model):
    """Samples of a call over ranks, or of a part alone, whose result is wrong; equal indices are of one round."""

    part: Part
    samples_ns: Times
    rank_samples_ns: Several[Times] = ()


class Memory(Model):
    """Peak memory of one call, split by purpose; None if this device cannot measure it.

    `source`: torch's allocator; resident sets in old records. `kept_bytes`: of the built function. `process_bytes`:
    bytes that calls added to the process; the part outside torch's allocator counts as workspace.
    """

    peak_bytes: int
    inputs_bytes: int | None = None
    parameters_bytes: int | None = None
    kept_bytes: int | None = None
    process_bytes: int | None = None
    workspace_bytes: int | None = None
    saved_for_backward_bytes: int | None = None
    isolated: bool = False
    source: MemorySource = "resident_set"
    method: str = ""


class MemoryPlan(Model):
    """Bytes on the device at the fullest moment of a call, by what they are for; they add up to the peak.

    inputs: q, k, v (or embeddings), with dout unless the mode is forward. saved: tensors that live from forward to
    backward, with the result, without inputs. workspace: all others. tables: index tensors and block lists that are
    kept between calls. Over ranks it is what the fullest rank holds.
    """

    inputs_bytes: int
    parameters_bytes: int = 0
    saved_bytes: int = 0
    workspace_bytes: int
    tables_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The bytes that must fit, as the engine's memory pass measures them."""
        held = self.inputs_bytes + self.parameters_bytes + self.tables_bytes
        return held + self.saved_bytes + self.workspace_bytes


class KernelUse(Model):
    """A kernel that really ran in one call, from the profiler."""

    name: str
    count: int
    duration_ns: int


class Measured(Model):
    """A case that was verified and timed. The first timing is the one that tables show.

    `setup_ns`: parts of the first `build`. `wall_ns`: what the run spent on the case, by stage, and on the checks of
    its timed calls (`timed_checks`).
    """

    status: Literal["measured"] = "measured"
    verification: Verification
    timings: Several[Timing]
    memory: Memory | None = None
    kernels: Several[KernelUse] = ()
    setup_ns: dict[str, int] = Field(default_factory=dict)
    wall_ns: dict[str, int] = Field(default_factory=dict)
    counters: dict[str, int] = Field(default_factory=dict)
    diagnostics: Several[Diagnostic] = ()
    notes: Several[Note] = ()


class Failed(Model):
    """A case that went wrong, with the stage, the code that programs decide on, and the reason. It carries no time."""

    status: Literal["failed"] = "failed"
    stage: Stage
    code: FailureCode
    why: str
    verification: Verification | None = None
    traceback: str | None = None


Outcome = Annotated[Measured | Skipped | Failed, Field(discriminator="status")]


class Row(Model):
    """A planned case and how it ended."""

    planned: PlannedCase
    outcome: Outcome

    @property
    def case(self) -> Case:
        """The effective case."""
        return self.planned.case

    @property
    def is_impossible(self) -> bool:
        """Whether a note says that its time cannot be true."""
        notes = self.outcome.notes if isinstance(self.outcome, Measured) else ()
        return any(kind.disqualifies for note in notes if (kind := NOTES.get(note.code)))


class CpuInfo(Model):
    """The processor and how much of it the run may use."""

    model: str
    cores: int
    threads: int
    governor: str | None = None
    load_1m: float | None = None
    memory_bytes: int | None = None


class GitInfo(Model):
    """The commit that the working folder is on."""

    sha: str
    dirty: bool


class Environment(Model):
    """The environment of a run. Two records can be compared only if `fingerprint_hard` matches."""

    os: str
    python: str
    cpu: CpuInfo
    gpus: Several[GpuInfo] = ()
    packages: dict[str, str] = Field(default_factory=dict)
    torch: dict[str, str] = Field(default_factory=dict)
    git: GitInfo | None = None
    container: bool = False
    fingerprint_hard: dict[str, str] = Field(default_factory=dict)
    fingerprint_soft: dict[str, str] = Field(default_factory=dict)


def moment_of(text: str | None) -> datetime | None:
    """A time of ISO 8601 in UTC, also if it names no zone; None if it cannot be read, as in an edited record."""
    try:
        moment = datetime.fromisoformat(text or "")
        return moment.replace(tzinfo=moment.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


class PluginInfo(Model):
    """A plug-in that took part in the run."""

    name: str
    distribution: str | None = None
    version: str | None = None


class RunHeader(Model):
    """Everything about a run but its rows; the first line of the JSON-lines file."""

    schema_version: str = SCHEMA_VERSION
    tool_version: str
    run_id: str
    suite: str
    argv: Several[str] = ()
    config: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    device: str = "cpu"
    started_at: str
    environment: Environment
    plugins: Several[PluginInfo] = ()
    ceilings: dict[str, float] = Field(default_factory=dict)
    estimator: str = ESTIMATOR

    @property
    def started(self) -> datetime | None:
        """When the run started."""
        return moment_of(self.started_at)


class RunRecord(RunHeader):
    """A whole run: header, rows and how it ended.

    wall_ns: what the run spent besides its measured rows, by stage. digest: of the text before it in run.json, None
    elsewhere; records that say the same are equal whatever it is.
    """

    status: Literal["complete", "interrupted", "failed"] = "complete"
    finished_at: str | None = None
    rows: Several[Row] = ()
    projections: Several[dict[str, Any]] = ()
    wall_ns: dict[str, int] = Field(default_factory=dict)
    digest: str | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the end; 0 if one of them is not known, or the end is the earlier one."""
        finished = moment_of(self.finished_at)
        return max(0.0, (finished - self.started).total_seconds()) if finished and self.started else 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RunRecord):
            return NotImplemented
        mine, theirs = ({**vars(record), "digest": None} for record in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        ended = Counter(row.outcome.status for row in self.rows).items()
        rows = ", ".join(f"{count} {status}" for status, count in ended)
        return f"<RunRecord {self.run_id}: {self.suite} on {self.device}, {self.status}, {rows or 'no rows'}>"
