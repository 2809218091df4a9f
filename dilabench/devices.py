"""What is known of each kind of device without torch: its defaults and limits. `engine/device` has what calls torch."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

from dilabench.workload.spec import DType

# How large the workloads are that suites ask for unless told: a processor's, or those that fill a data-centre GPU.
Size = Literal["small", "large"]
# In descriptors (`Capabilities.devices`), any device that torch.accelerator knows besides CUDA.
ACCELERATOR: Final = "accelerator"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A kind of device: `name` as torch spells it, `word` for it in the descriptors of what runs on it.

    `dtypes`: the preferred one from each compute capability on (0 for what has none), highest first.
    `tuned`: dilabench has kernels for it. `own_memory`: its memory is its own, and each rank has such a device for
    itself. `holds_float64`: it computes in float64, so that verification runs on it.
    `margin`, `precision`: of comparisons, and of an interval to stop sampling at, relative. `sampling_s`: longest
    sampling of a case. `warm_up_s`: shortest and longest warm-up. `min_timeout_s`: time for any command.
    `above_peak`: times its measured peak that a call may seem to reach. `affordable_flops`: of a call that verification
    may add. `matmul_size`, `wide_matmul_size` (of float32 and float64), `copy_bytes`: of the measurement of peaks.
    """

    name: str
    word: str
    dtypes: tuple[tuple[int, DType], ...] = ((0, "float32"),)
    tuned: bool = True
    size: Size
    own_memory: bool
    holds_float64: bool = True
    margin: float
    precision: float
    sampling_s: float
    warm_up_s: tuple[float, float]
    min_timeout_s: float
    above_peak: float
    affordable_flops: float
    matmul_size: int
    wide_matmul_size: int
    copy_bytes: int

    def word_in(self, words: Collection[str]) -> str:
        """The word of a descriptor that means this device: its own name, else that of its kind if `words` has it."""
        return self.word if self.name not in words and self.word in words else self.name

    def preferred_dtype(self, compute_capability: int) -> DType:
        """The dtype that `auto` means on such a device."""
        return next(dtype for least, dtype in self.dtypes if compute_capability >= least)


CPU = DeviceFacts(
    name="cpu",
    word="cpu",
    size="small",
    own_memory=False,
    margin=0.02,
    precision=0.02,
    sampling_s=2.0,
    warm_up_s=(0.0, 0.5),
    min_timeout_s=20.0,
    above_peak=1.5,
    # About a second of two cores.
    affordable_flops=5e10,
    matmul_size=1024,
    wide_matmul_size=1024,
    copy_bytes=64 << 20,
)
CUDA = DeviceFacts(
    name="cuda",
    word="cuda",
    dtypes=((80, "bfloat16"), (70, "float16"), (0, "float32")),
    size="large",
    own_memory=True,
    margin=0.03,
    precision=0.01,
    sampling_s=3.0,
    warm_up_s=(0.3, 5.0),
    # A first call may compile: FlexAttention and CuTe kernels were seen to take up to half a minute.
    min_timeout_s=60.0,
    above_peak=1.1,
    # About ten seconds.
    affordable_flops=4e15,
    matmul_size=8192,
    # It multiplies float64, and float32 without tensor cores, far slower; a smaller matrix tells as much.
    wide_matmul_size=4096,
    copy_bytes=1 << 30,
)
# Nothing was measured on such a device: times are those of the host's clock, with the margins of a processor.
_OTHER = replace(
    CPU,
    name=ACCELERATOR,
    word=ACCELERATOR,
    tuned=False,
    own_memory=True,
    holds_float64=False,
    warm_up_s=CUDA.warm_up_s,
    min_timeout_s=CUDA.min_timeout_s,
    matmul_size=4096,
    wide_matmul_size=4096,
    copy_bytes=256 << 20,
)
TUNED = (CPU, CUDA)
WORDS = frozenset({*(device.word for device in TUNED), ACCELERATOR})


@cache
def device_named(name: str) -> DeviceFacts:
    """The facts of 'cpu', 'cuda:1' or 'mps': of any name that is not dilabench's, those of an untuned accelerator."""
    kind = name.partition(":")[0]
    return next((device for device in TUNED if device.name == kind), None) or replace(_OTHER, name=kind)
