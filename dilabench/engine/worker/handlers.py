"""The commands of a worker (torch). Every exception becomes a reply: this is the worker boundary."""

import errno
import gc
import hashlib
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dilabench.distributed.failures import tells_of_another
from dilabench.distributed.launch import meeting_store, share_cores
from dilabench.distributed.world import MessageCounts, Traffic, Work, World
from dilabench.engine.call.compile_and_graph import OptimizationUnusableError
from dilabench.engine.call.counted_bytes import counted
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.intact import functions_of, restored, watched
from dilabench.engine.call.kernel_trace import kernel_ledger, profiled
from dilabench.engine.call.peak_memory import measure_memory
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.returned import UnusableFunctionError
from dilabench.engine.call.timed_calls import drawn_together
from dilabench.engine.call.torch_settings import as_text, settings_kept
from dilabench.engine.device import clocks
from dilabench.engine.device.capture import no_collection
from dilabench.engine.device.clocks import clocks_of
from dilabench.engine.device.device import describe_torch, device_of, measure_ceilings, torch_device
from dilabench.engine.timers import HeldTimer, SampleTimer, TimerUnusableError, cuda_events, wall
from dilabench.engine.verify import summary
from dilabench.engine.verify.case_verifier import CaseVerifier
from dilabench.engine.verify.timed_outputs import TimedOutputs
from dilabench.engine.worker.isolated_call import measure_isolated
from dilabench.engine.worker.overlap_timing import time_parts
from dilabench.engine.worker.protocol import (
    Command,
    Diagnose,
    MeasureCeilings,
    MeasureIsolated,
    MeasureMemory,
    Prepare,
    Profile,
    Release,
    TakeSlot,
    Verify,
    WarmUp,
    WorkerSettings,
)
from dilabench.engine.worker.replies import (
    Ceilings,
    Diagnosed,
    Hello,
    Isolated,
    MemoryMeasured,
    Prepared,
    Profiled,
    RankState,
    Released,
    Reply,
    Sampled,
    Trouble,
    TroubleCode,
    Verified,
    WarmedUp,
)
from dilabench.engine.worker.warmup import WarmUpLimits, WarmUpResult, warm_up
from dilabench.errors import PluginError, encodable, first_line, text_of
from dilabench.metadata import CHANGED_SETTINGS, MESSAGES_BY_KERNELS, TRANSPORT, refuse_unknown
from dilabench.plugins.boundary import place
from dilabench.record import Check, CheckName, Note, Slot, Verification

# Least calls of a slot whose last call is checked: the first may have wholly different inputs, the last shares all but
# some rows with its predecessor.
CHECKED_CALLS = 2
# Share of the time for which a command's answer is waited for after which a rank stops waiting for a message.
SHARE_OF_TIMEOUT = 0.7
# Functions that samples, messages and their counts depend on, before any plug-in is imported.
WATCHED = functions_of(
    *(World, Work, Traffic, MessageCounts, HeldTimer),
    *(wall, wall.Wall, cuda_events, cuda_events.ColdStage, clocks),
)
# A device without a timed call for so long counts as idle: its clocks may be down.
IDLE_NS = 1_000_000_000
OOM_PHRASES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


class Handlers:
    """The prepared cases of a worker and the answers to commands about them."""

    def __init__(self, settings: WorkerSettings) -> None:
        # Objects loaded by now stay; frozen, the garbage collector does not scan them again.
        gc.freeze()
        self._settings = settings
        self._world: World | None = None
        self.device = torch_device(settings.device, settings.gpu)
        self._hardware = device_of(self.device)
        self._hardware.make_current()
        # torchrun says how many of its ranks are on this machine.
        ranks = settings.world_size
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if ranks > 1 else 1
        if settings.num_workers * ranks_here > 1:
            share_cores(settings.num_workers * ranks_here)
        self._calls: dict[str, PreparedCall] = {}
        self._timers: dict[tuple[str, str], SampleTimer] = {}
        self._checkers: dict[str, TimedOutputs] = {}
        self._calls_here: dict[str, bool] = {}
        self._weighed: set[str] = set()
        self._busy_until_ns = 0
        self._input_store = InputStore(self.device)
        self._verifier = CaseVerifier(self.device)
        self._clocks = clocks_of(self._hardware.uuid)
        self._commands: dict[type[Command[Any]], Callable[[Any], Reply]] = {
            Prepare: self._prepare,
            Verify: self._verify,
            Profile: self._profile,
            WarmUp: self._warm_up,
            TakeSlot: self._slot,
            Diagnose: self._diagnose,
            MeasureMemory: self._memory,
            MeasureCeilings: self._ceilings,
            Release: self._release,
            MeasureIsolated: self._isolated,
        }

    def hello(self) -> Hello:
        """Process id and torch facts of this worker."""
        return Hello(pid=os.getpid(), torch=describe_torch(self._hardware))

    def answer(self, command: Command[Any]) -> Reply:
        """Carry out a command; an exception becomes `Trouble`."""
        with watched(WATCHED):
            try:
                with settings_kept({}):
                    if self._world is not None:
                        # Shorter than the caller's limit, so that this rank can report what it waits for.
                        limit_s = command.timeout_s
                        self._world.limit_waits(None if limit_s is None else SHARE_OF_TIMEOUT * limit_s)
                    reply = self._commands[type(command)](command)
                    if replaced := restored():
                        raise UnusableFunctionError(f"{' and '.join(replaced)}; it was put back")
                    if self._world is not None:
                        self._world.check()
            # The worker boundary: code of any plug-in runs in here and may raise or exit as it likes.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                restored()
                reply = self._trouble(error)
        return reply if self._world is None else reply.model_copy(update={"state": self._state(command.handle)})

    def _state(self, handle: str) -> RankState:
        assert self._world is not None
        call, counts = self._calls.get(handle), self._world.counts
        return RankState(
            shared="" if call is None else hashlib.sha256(repr(call.shared_state).encode()).hexdigest()[:16],
            sent=tuple((messages, nbytes) for messages, nbytes in counts.sent),
            received=tuple((messages, nbytes) for messages, nbytes in counts.received),
        )

    def _prepare(self, command: Prepare) -> Prepared:
        spec = command.spec
        # To look for garbage takes tens of milliseconds.
        if spec.handle in self._calls:
            self._drop(spec.handle)
        call = PreparedCall(spec, self.device, self._input_store, self._joined())
        self._calls[spec.handle] = call
        self._checkers[spec.handle] = TimedOutputs(call)
        notes = (*call.notes, *_settings_notes(call.changed_settings))
        return Prepared(setup_ns=call.setup_ns, call_ns=call.call_ns, notes=notes)

    def _joined(self) -> World | None:
        """The world of this worker's ranks, joined at the first case; None for a worker without other ranks."""
        settings = self._settings
        if settings.world_size > 1 and self._world is None:
            store = meeting_store(settings.store, settings.world_size)
            self._world = World.join(
                store, settings.rank, settings.world_size, self.device, timeout_s=settings.rank_timeout_s
            )
        return self._world

    def _verify(self, command: Verify) -> Verified:
        verification, why = self._verifier.verify(self._calls[command.handle])
        self._checkers[command.handle].know(verification)
        self._hardware.release_cached()
        return Verified(verification=verification, why=why)

    def _profile(self, command: Profile) -> Profiled:
        trace, call = command.trace, self._calls[command.handle]
        # On a CPU one call shows both; in mode backward the forward pass, which belongs to the peak, is not in it.
        with_memory = self._hardware.profiles_memory and call.workload.mode != "backward"
        if with_memory:
            gc.collect()
        seen = profiled(call.fresh(), self.device, memory=with_memory)
        kernels = kernel_ledger(seen, self.device, Path(trace) if trace else None)
        return Profiled(kernels=kernels, memory=measure_memory(call, seen) if with_memory else None)

    def _warm_up(self, command: WarmUp) -> WarmedUp:
        call, spec = self._calls[command.handle], command.timer
        # Timing begins when all cases of the group are verified; the oracle's tensors must not crowd the device.
        self._verifier.forget()
        try:
            timer: SampleTimer = HeldTimer(spec.target, call)
        except TimerUnusableError as reason:
            return WarmedUp(samples_ns=(), settled=False, unusable=str(reason))
        self._timers[command.handle, spec.name] = timer
        self._calls_here[spec.name] = not spec.fresh_process
        gc.collect()
        kept = settings_kept(call.changed_settings)
        with no_collection(), kept, self._hardware.high_water() as process, call.timed_calls.slot():
            result = self._warmed(timer, call, command.limits)
        if result.samples_ns:
            self._weighed.add(command.handle)
            self._busy_until_ns = time.monotonic_ns()
        return WarmedUp(
            samples_ns=result.samples_ns,
            settled=result.settled,
            notes=self._notes(timer),
            process_bytes=max(process, default=None) if result.samples_ns else None,
        )

    def _warmed(self, timer: SampleTimer, call: PreparedCall, limits: WarmUpLimits) -> WarmUpResult:
        world = self._world
        idle_ns = time.monotonic_ns() - self._busy_until_ns
        if (idle_ns if world is None else world.max_over_ranks([idle_ns])[0]) < IDLE_NS:
            limits = limits.model_copy(update={"min_s": 0.0})
        if world is None:
            return warm_up(lambda count: timer.take(count).samples_ns, call.call_ns, limits)
        # Ranks must stop after the same sample: they look at the slowest rank's samples, and at its clock.
        return warm_up(
            lambda count: world.max_over_ranks(timer.take(count).samples_ns),
            call.call_ns,
            limits,
            clock=lambda: world.max_over_ranks([time.monotonic_ns()])[0] * 1e-9,
        )

    def _slot(self, command: TakeSlot) -> Sampled:
        """Samples; after the last slot also the check of its last call and of random calls of all slots. A call cannot
        tell which of the two it is in. Raises PluginError for a timer that made fewer calls than samples.
        """
        timer, call = self._timers[command.handle, command.timer], self._calls[command.handle]
        checker, timed = self._checkers[command.handle], call.timed_calls
        last, wanted = command.last, command.count
        count = max(wanted, CHECKED_CALLS) if last else wanted
        # A call too long to be warmed up is weighed in its first slot.
        weighed: AbstractContextManager[list[int]] = nullcontext([])
        weighing = weighed if command.handle in self._weighed else self._hardware.high_water()
        self._weighed.add(command.handle)
        with no_collection():
            with settings_kept(call.changed_settings), weighing as process, counted(call) as other_bytes:
                timed.begin(last, count=count, seed=drawn_together(self._world))
                started = time.perf_counter_ns()
                try:
                    samples = timer.take(count)
                    calls, renewed, changed = timed.calls, tuple(timed.renewed), tuple(timed.changed)
                    if last and call.rotates:
                        # A result kept by the address of inputs shows only if a set comes again, with other numbers.
                        # These samples do not count.
                        call.keeps_set = True
                        timer.take(CHECKED_CALLS)
                finally:
                    call.keeps_set = False
                    kept = timed.end()
                    replaced = restored()
                elapsed_ns = max(0, time.perf_counter_ns() - started)
                if self._world is not None:
                    self._world.barrier()
                    self._world.confirm_counts()
            clocks = self._clocks.read()
        self._busy_until_ns = time.monotonic_ns()
        made = timed.calls - timed.unmade
        if made < count and self._calls_here[command.timer]:
            raise PluginError(f"timer {command.timer!r} gave {count} samples of {made} calls")
        slot = Slot(
            samples_ns=samples.samples_ns[-wanted:],
            enqueue_ns=samples.enqueue_ns[-wanted:],
            renewed=_samples_of(renewed, calls, count, wanted) if self._world is None else (),
            changed=_samples_of(changed, calls, count, wanted) if self._world is None else (),
            sm_clock_mhz=clocks.sm_clock_mhz,
            power_mw=clocks.power_mw,
            temperature_c=clocks.temperature_c,
            throttle=clocks.throttle,
        )
        checker.sampled(elapsed_ns)
        verification = checker.check(kept) if kept is not None else None
        if not self._calls_here[command.timer]:
            verification = samples.verification
        if other_bytes:
            found = Check(name=CheckName.TIMED_MESSAGES, passed=False, detail="; ".join(other_bytes))
            verification = Verification(checks=(found,))
        if replaced:
            found = Check(name=CheckName.INTACT, passed=False, detail=f"after a timed call {' and '.join(replaced)}")
            verification = Verification(checks=(found,))
        return Sampled(
            slot=slot,
            notes=(*self._notes(timer), *_settings_notes(call.changed_settings)),
            counters=call.counters(),
            process_bytes=max(process, default=None),
            verification=verification,
            why=summary(verification) if verification else "",
        )

    def _notes(self, timer: SampleTimer) -> tuple[Note, ...]:
        """The timer's notes, and what carries messages. Raises PluginError for unknown codes."""
        notes, world = tuple(timer.notes()), self._world
        refuse_unknown("note", [note.code for note in notes])
        if world is None:
            return notes
        if world.device.type != "cuda" or world.copies is not None:
            return *notes, TRANSPORT.note(f"messages go by {world.transport}")
        message = f"messages go by {world.transport}, whose kernels wait for attention kernels and slow them down"
        return *notes, MESSAGES_BY_KERNELS.note(message)

    def _diagnose(self, command: Diagnose) -> Diagnosed:
        timer = partial(HeldTimer, command.timer.target)
        with no_collection():
            parts = time_parts(self._calls[command.handle], timer, command.turns)
        gc.collect()
        self._hardware.release_cached()
        return Diagnosed(diagnostics=parts)

    def _memory(self, command: MeasureMemory) -> MemoryMeasured:
        return MemoryMeasured(memory=measure_memory(self._calls[command.handle]))

    def _ceilings(self, command: MeasureCeilings) -> Ceilings:
        ceilings = measure_ceilings(self.device, command.dtypes)
        self._hardware.release_cached()
        return Ceilings(ceilings=ceilings)

    def _isolated(self, command: MeasureIsolated) -> Isolated:
        return measure_isolated(command.spec, self.device, command.limit_bytes, command.seconds, self._joined())

    def _release(self, command: Release) -> Released:
        self._drop(command.handle)
        return Released()

    def _drop(self, handle: str) -> None:
        """Forget a case; with the last one go the shared inputs and the memory that the allocator holds."""
        call = self._calls.pop(handle, None)
        self._checkers.pop(handle, None)
        self._weighed.discard(handle)
        if call is not None:
            call.forget()
        for key in [key for key in self._timers if key[0] == handle]:
            del self._timers[key]
        if not self._calls:
            self._input_store.clear()
            self._verifier.forget()
        gc.collect()
        self._hardware.release_cached()

    def _trouble(self, error: BaseException) -> Trouble:
        text = encodable("".join(traceback.format_exception(error)))
        broken, lost_messages = self._device_is_broken(), self._lost_messages()
        fatal = broken or lost_messages
        line = first_line(error)
        if fatal:
            for call in self._calls.values():
                call.forget()
        if isinstance(error, OptimizationUnusableError):
            return Trouble(code="unusable_optimization", why=line, traceback=text, fatal=fatal)
        if is_out_of_memory(error):
            # The frames in the traceback hold the tensors that did not fit.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            if not fatal:
                self._hardware.release_cached()
            why = f"out of memory: {line or type(error).__name__}"
            return Trouble(code="out_of_memory", why=why, traceback=text, fatal=fatal)
        name = type(error).__name__
        why = f"{name}: {line}" if line else name
        if isinstance(error, UnusableFunctionError):
            why = line
        if broken and not lost_messages:
            why += " (the CUDA context is lost; the worker process was ended)"
        # torch raises the same types for this rank's own faults: only the text distinguishes them.
        lost = self._settings.world_size > 1 and tells_of_another(why)
        code: TroubleCode = "peer_lost" if lost else "exception"
        return Trouble(code=code, why=why + place(error, also_ours=False), traceback=text, fatal=fatal)

    def _lost_messages(self) -> bool:
        """Whether a message of this rank was lost: then it is out of step with the others for ever."""
        try:
            if self._world is not None:
                self._world.check()
        except RuntimeError:
            return True
        return False

    def _device_is_broken(self) -> bool:
        """A CUDA error such as an illegal address stays with the process for ever."""
        try:
            self._hardware.synchronize()
        except RuntimeError:
            return True
        return False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the host or on the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(phrase in text_of(error).lower() for phrase in OOM_PHRASES)


def _settings_notes(changed: Mapping[str, str]) -> tuple[Note, ...]:
    if not changed:
        return ()
    message = f"its code changed settings of all of torch: {as_text(changed)}; they were put back each time"
    return (CHANGED_SETTINGS.note(message),)


def _samples_of(calls: Sequence[int], made: int, count: int, wanted: int) -> tuple[int, ...]:
    """Numbers of the last `wanted` of `count` samples among whose `made` calls is one of `calls`."""
    per_sample, rest = divmod(made, count)
    if rest or not per_sample:
        return ()
    samples = dict.fromkeys(call // per_sample - (count - wanted) for call in calls)
    return tuple(sample for sample in samples if sample >= 0)
