"""The registry of everything in a row that is named by a key: labels, counters and notes. No torch.

Code that writes or reads one uses its constant. A plug-in's keys are written 'plugin:key' and need no entry;
`refuse_unknown` is called where rows are written. docs/reference/run-record.md shows these entries as a table.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from dilabench.errors import PluginError
from dilabench.units import format_bytes, format_seconds
from dilabench.validation import Model

Unit = Literal["", "count", "bytes", "ns", "share", "percent", "times", "FLOP/s", "bytes/s", "°C", "processors"]
ValueT = TypeVar("ValueT")

_PLUGIN_KEY = re.compile(r"[\w.-]+:\S")
_FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "": lambda value: f"{value:.3g}",
    "count": lambda value: f"{value:g}" if value != int(value) else str(int(value)),
    "bytes": format_bytes,
    "ns": lambda value: format_seconds(value * 1e-9),
    "share": lambda value: f"{value:.1%}",
    "percent": lambda value: f"{value:g} %",
    "times": lambda value: f"{value:.3g}x",
    "FLOP/s": lambda value: f"{value:.3g} FLOP/s",
    "bytes/s": lambda value: f"{value:.3g} bytes/s",
    "°C": lambda value: f"{value:g} °C",
    "processors": lambda value: f"{value:.3g} processors",
}


class Note(Model):
    """A structured warning on a row: what was seen, against which limit, and what to do."""

    code: str
    message: str
    observed: float | None = None
    threshold: float | None = None
    hint: str | None = None


class Labelled(Protocol):
    """The carrier of labels: a planned case."""

    @property
    def labels(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Label(Generic[ValueT]):
    """A label of a planned case. The record holds it as text: `write` makes it, `read` parses it."""

    key: str
    meaning: str
    read: Callable[[str], ValueT]
    write: Callable[[ValueT], str] = str
    unit: Unit = ""

    def entry(self, value: ValueT) -> dict[str, str]:
        """The label with a value, to be put among the labels of a planned case."""
        return {self.key: self.write(value)}

    def of(self, planned: Labelled) -> ValueT | None:
        """The value on a planned case; None if it has no such label."""
        text = planned.labels.get(self.key)
        return None if text is None else self.read(text)


@dataclass(frozen=True, slots=True)
class Counter:
    """Something that was counted while a case was measured; a whole number."""

    key: str
    meaning: str
    unit: Unit = "count"

    def of(self, outcome: object) -> int | None:
        """The count of a measured row's outcome; None if it was not counted, or the row was not measured."""
        counters: Mapping[str, int] = getattr(outcome, "counters", {})
        return counters.get(self.key)

    def shown(self, count: int) -> str:
        """A count with its unit, as readers see it."""
        return _FORMATS[self.unit](count)


@dataclass(frozen=True, slots=True)
class NoteKind:
    """A kind of note; `unit`: of the observed value and its threshold, which readers see after the words `seen` and
    `limit`.

    `disqualifies`: the time of a row with such a note cannot be true; it is neither ranked nor quoted. `at_start`: a
    run shows it at its start, for example a busy machine. `kernels`: regular expressions; a kernel of such a row must
    match one of them instead of the backend's.
    """

    key: str
    meaning: str
    unit: Unit = ""
    disqualifies: bool = False
    at_start: bool = False
    kernels: tuple[str, ...] = ()
    seen: str = "seen"
    limit: str = "limit"

    def note(
        self, message: str, *, observed: float | None = None, threshold: float | None = None, hint: str | None = None
    ) -> Note:
        """A note of this kind."""
        return Note(code=self.key, message=message, observed=observed, threshold=threshold, hint=hint)

    def among(self, notes: Iterable[Note]) -> tuple[Note, ...]:
        """The notes that are of this kind."""
        return tuple(note for note in notes if note.code == self.key)


WAY = Label("way", "suite `extreme`: how the search tries to go further; rows of one search have the same", str)
FORM = Label("form", "old records of suite `billion`: one sequence in memory, one over ranks, or a stream", str)
PART = Label("part", "old records of suite `billion`: the tokens requested, and which part of 2^30 that is", str)
SCALING = Label("scaling", "suite `distributed`: 'strong' (same length) or 'weak' (same length per rank)", str)
VARIANT = Label("variant", "suite `optimization`: what is switched on", str)
SUITE = Label("suite", "suite `all`: the suite that the case belongs to", str)
PRESET = Label("workload", "the name of the preset that the workload came from", str)
CHOSEN_BY = Label("chosen_by", "what `-i auto` decided on: a tuned choice, a measured one, or the rule", str)
SHAPE = Label("shape", "suite `choice`: the number of the shape among those drawn with the run's seed", int)
DENSITY_REACHED = Label(
    "density_reached", "share of visible block pairs that are computed", float, "{:.4f}".format, unit="share"
)
SPARSITY_REACHED = Label(
    "sparsity_reached", "in old records: the share that is not computed", float, "{:.4f}".format, unit="share"
)
STEPS = Label("steps", "suite `block-sparse`: the steps of a call, as 'select plan attend'", str)
STEPS_OF = Label("steps_of", "suite `block-sparse`: the implementation whose calls have these steps, all or some", str)
SELECTION = Label("selection", "SHA-256 (16 hex digits) of the indices of the key blocks that were selected", str)
OVERLAP = Label(
    "overlap", "share of a token's selected key blocks that the token before it selected, too", float, "{:.2f}".format
)

PATTERN_CACHE_HITS = Counter("pattern_cache_hits", "patterns taken from the cache")
PATTERN_CACHE_MISSES = Counter("pattern_cache_misses", "patterns that were built")
PATTERN_CACHE_ENTRIES = Counter("pattern_cache_entries", "patterns held")
PATTERN_CACHE_BYTES = Counter("pattern_cache_bytes", "what their tensors take", "bytes")
BUFFER_POOL_REQUESTS = Counter("buffer_pool_requests", "buffers requested")
BUFFER_POOL_REUSES = Counter("buffer_pool_reuses", "requests served from a buffer that was given back")
BUFFER_POOL_REUSED_BYTES = Counter("buffer_pool_reused_bytes", "bytes of these requests", "bytes")
BUFFER_POOL_PEAK_BYTES = Counter("buffer_pool_peak_bytes", "peak size of the pool, used and free", "bytes")
BUFFER_POOL_HELD_BYTES = Counter("buffer_pool_held_bytes", "what the pool keeps between calls", "bytes")
COMPILE_GRAPHS = Counter("compile_graphs", "graphs that torch.compile made")
COMPILE_BREAKS = Counter("compile_breaks", "breaks between them")
CUDA_GRAPH_BYTES = Counter("cuda_graph_bytes", "what the CUDA graph keeps between calls", "bytes")
STREAM_PIECES = Counter("stream_pieces", "old records: pieces of a stream that were computed")
STREAM_TOKENS = Counter("stream_tokens", "old records: tokens of these pieces")
STREAM_WALL_NS = Counter("stream_wall_ns", "old records: time of these pieces, inputs and verification included", "ns")
SENT_BYTES = Counter("sent_bytes", "sent to other ranks in one call, by the rank that sends most", "bytes")
RECEIVED_BYTES = Counter("received_bytes", "received from other ranks in one call, by the rank with most", "bytes")

# Among a record's ceilings.
COPY_KEY, READ_KEY = "copy_bytes_per_s", "read_bytes_per_s"

# Kinds of messages between ranks. Each has two counters in addition to the sums, 'sent_keys_bytes' and so on.
TRAFFIC: Mapping[str, str] = {
    "keys": "K and V",
    "gradients": "dK and dV",
    "heads": "q, k, v and out of whole heads (Ulysses)",
    "whole": "whole tensors",
    "parameters": "gradients of parameters",
}

FEW_SAMPLES = NoteKind("few_samples", "the budget ended before the least number of samples", "count")
UNCHECKED_SAMPLES = NoteKind(
    "unchecked_samples", "samples dropped because their process ended before its timed calls were checked", "count"
)
THROTTLED = NoteKind("throttled", "heat or power delivery slowed the GPU down", "share", seen="share of the samples")
INTERFERENCE = NoteKind("interference", "measured alone, its time differs from that in interleaved rounds", "share")
NOT_INTERLEAVED = NoteKind(
    "not_interleaved", "timed alone because memory or the budget did not suffice, so without pairs"
)
BUDGET_EXCEEDED = NoteKind("budget_exceeded", "the budget was exceeded so that its length has a row", "ns")
INTERRUPTED = NoteKind("interrupted", "Ctrl-C came after its timing")
CUT_SHORT = NoteKind("cut_short", "Ctrl-C came during its timing: --resume measures it again", "count")
NO_MEMORY_PASS = NoteKind("no_memory_pass", "the budget was used up before memory was measured")
NO_LEDGER = NoteKind("no_ledger", "the profiler saw no kernel, so the backend is claimed, not shown")
SLOW_RANK = NoteKind("slow_rank", "one rank takes at least twice as long as the median of the others", "times")
UNDIAGNOSED = NoteKind("undiagnosed", "communication and computation were not timed separately")
CHANGED_SETTINGS = NoteKind("changed_settings", "its code changed torch's settings for every other; they were put back")
TIMER_UNUSABLE = NoteKind("timer_unusable", "a timer cannot time this call")
LAUNCH_BOUND = NoteKind(
    "launch_bound",
    "the host takes longer to launch a call than the GPU to compute it",
    "ns",
    seen="host",
    limit="GPU",
)
LAUNCH_EXPOSED = NoteKind("launch_exposed", "launching takes longer than the timer can hide", "ns")
NO_FLUSH = NoteKind("no_flush", "inputs are so large that the L2 cache was not flushed", "bytes", seen="inputs")
BATCHED = NoteKind("batched", "a sample is the mean of this many calls", "count")
CLOCK = NoteKind("clock", "samples taken again because the host clock did not advance", "count")
FIRST_CALL = NoteKind("first_call", "the parts of the last first call")
TRANSPORT = NoteKind("transport", "what carried the messages between ranks")
MESSAGES_BY_KERNELS = NoteKind("messages_by_kernels", "messages between GPUs wait for attention kernels")
OWN_TILES = NoteKind(
    "own_tiles",
    "the backend has no kernel for packed sequences, which dilabench's own tiles computed in its place",
    kernels=(r"_(block_query|block_key|forward)_kernel",),
)
FUSED_BRANCHES = NoteKind(
    "fused_branches",
    "over ranks, branches whose segments lie on a rank are computed by fused in the backend's place",
    kernels=(r"_(query|key|narrow|backward|forward)_kernel",),
)
UNTUNED_DEVICE = NoteKind("untuned_device", "no kernel of dilabench is tuned for this device")
MEMORY_LIMIT = NoteKind("memory_limit", "what the process of an isolated case was allowed", "bytes")
STREAMED = NoteKind("streamed", "old records: pieces, each a separate sequence; a sample is one piece")
STREAM_CUT_SHORT = NoteKind(
    "stream_cut_short", "old records: the budget ended a stream; pieces done and wanted", "count"
)
STREAM_INTERRUPTED = NoteKind(
    "stream_interrupted", "old records: Ctrl-C ended a stream; pieces done and wanted", "count"
)
ABOVE_PEAK_FLOPS = NoteKind("above_peak_flops", "more FLOP/s than this device can do", "FLOP/s", disqualifies=True)
ABOVE_PEAK_BANDWIDTH = NoteKind(
    "above_peak_bandwidth", "more bytes/s than this device can move", "bytes/s", disqualifies=True
)
GROWS_TOO_SLOWLY = NoteKind(
    "grows_too_slowly", "time grew much less than the work (old records only)", "times", disqualifies=True
)
WORK_KEPT = NoteKind(
    "work_kept",
    "a call on new inputs takes longer than one on nearly the same: work was kept",
    "times",
    disqualifies=True,
)
CHOSEN = NoteKind(
    "chosen", "what the library took, and how long it took to choose, before any timed call", "ns", seen="choosing took"
)
UNCHECKED = NoteKind("unchecked", "the pattern's plug-in failed to give the figures that the time is checked against")

# Notes of `dilabench doctor` on a machine; no row has these.
GPU_SHARED = NoteKind("gpu_shared", "other processes use the GPU", "count", at_start=True)
GPU_BUSY = NoteKind("gpu_busy", "the GPU is busy", "percent", at_start=True)
GPU_HOT = NoteKind("gpu_hot", "the GPU is hot before anything has run", "°C")
GPU_PERSISTENCE_OFF = NoteKind("gpu_persistence_off", "the driver may unload between processes")
LOAD = NoteKind("load", "other programs use the processor; load of the last minute", "processors", at_start=True)
BATTERY = NoteKind("battery", "the machine runs on battery")
GOVERNOR = NoteKind("governor", "clocks follow the load")
TURBO = NoteKind("turbo", "clocks depend on temperature")
CPU_QUOTA = NoteKind(
    "cpu_quota", "the control group allows fewer processors than there are", "processors", at_start=True
)
MEMORY_LIMIT = NoteKind("memory_limit", "the control group allows less memory than there is", "bytes", at_start=True)
AFFINITY = NoteKind("affinity", "the process may move between processors")
THREAD_VARIABLES = NoteKind("thread_variables", "the environment sets the number of threads")
LOW_MEMORY = NoteKind("low_memory", "little memory is free", "bytes")
SWAP = NoteKind("swap", "memory has been swapped out", "bytes")


# The dtypes of tensor cores. If a device has them, their rate bounds that of float32.
TENSOR_CORE_DTYPE = "bfloat16"


def matmul_key(dtype: str) -> str:
    """The key, among a record's ceilings, of the FLOP/s of a matrix product in a dtype."""
    return f"matmul_{dtype}_flops_per_s"


def peak_flops(ceilings: Mapping[str, float], dtype: str) -> float | None:
    """The highest FLOP/s of attention in a dtype, by a record's ceilings; None if unknown.

    Tensor cores split float32 into at least two numbers of half precision, which takes three products; Triton's bf16x6
    takes six products of three numbers.
    """
    own, half = ceilings.get(matmul_key(dtype)), ceilings.get(matmul_key(TENSOR_CORE_DTYPE))
    return own if dtype != "float32" or half is None else max(own or 0.0, half / 3)


def peak_bandwidth(ceilings: Mapping[str, float]) -> float | None:
    """The highest bytes/s of memory, by a record's ceilings; None if unknown. Older records have no rate of reading."""
    return max((ceilings[key] for key in (COPY_KEY, READ_KEY) if key in ceilings), default=None)


def traffic_key(direction: Literal["sent", "received"], kind: str) -> str:
    """The key of a counter of messages: 'sent_keys_bytes'; 'plugin:sent_rows_bytes' for a kind 'plugin:rows'."""
    plugin, colon, name = kind.rpartition(":")
    return f"{plugin}{colon}{direction}_{name}_bytes"


LABELS: dict[str, Label[Any]] = {}
COUNTERS: dict[str, Counter] = {}
NOTES: dict[str, NoteKind] = {}
for _entry in tuple(globals().values()):
    if isinstance(_entry, Label):
        LABELS[_entry.key] = _entry
    elif isinstance(_entry, Counter):
        COUNTERS[_entry.key] = _entry
    elif isinstance(_entry, NoteKind):
        NOTES[_entry.key] = _entry
for _direction in ("sent", "received"):
    for _kind, _content in TRAFFIC.items():
        _entry = Counter(f"{_direction}_{_kind}_bytes", f"of the bytes {_direction}: {_content}", "bytes")
        COUNTERS[_entry.key] = _entry
_KNOWN: Mapping[str, Mapping[str, object]] = {"label": LABELS, "counter": COUNTERS, "note": NOTES}


def refuse_unknown(what: Literal["label", "counter", "note"], keys: Iterable[str]) -> None:
    """Raise PluginError for a key that is neither in the registry nor a plug-in's own ('plugin:key')."""
    for key in keys:
        if key not in _KNOWN[what] and not _PLUGIN_KEY.match(key):
            raise PluginError(
                f"{what} {key!r} is not one of dilabench's own; a plug-in writes its name before it: 'plugin:{key}' "
                "(docs/reference/run-record.md lists those there are)"
            )


def note_figures(note: Note) -> str:
    """What was observed and its limit, in the note's unit: 'seen 5, limit 20'; empty if it has no figures.

    Figures of the message are not repeated.
    """
    if note.observed is None:
        return ""
    kind = NOTES.get(note.code, NoteKind(note.code, ""))
    shown = _FORMATS[kind.unit]
    figures = {kind.seen: shown(note.observed)}
    if note.threshold is not None:
        figures[kind.limit] = shown(note.threshold)
    said = (
        f"{word} {text}"
        for word, text in figures.items()
        if not re.search(rf"\b{re.escape(text.lstrip('-'))}(?!\w)", note.message)
    )
    return ", ".join(said)


def note_text(note: Note) -> str:
    """A note as readers see it: its message, its figures, what to do."""
    figures = note_figures(note)
    return note.message + (f" ({figures})" if figures else "") + (f"; {note.hint}" if note.hint else "")
