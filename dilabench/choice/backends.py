"""The dense kernels that dilabench can call. Each module has `attend` and `attend_backward`, and some have `packed`."""

from dataclasses import replace

from dilabench.choice.descriptors import FLASH_4, Backend, Capabilities
from dilabench.choice.implementations import CPU, CUDA, DENSE, HALF
from dilabench.kernels.cpu.compiled import FEW_ROWS
from dilabench.machine import ACCELERATOR, WORDS, detect, multiplies_bfloat16_tiles
from dilabench.workload.spec import UNBOUNDED, Workload


def _window_looks_ahead(workload: Workload) -> str | None:
    """Return why kernels with causal windows only do not support the workload, or None."""
    ahead = workload.window[1] > 0 or (workload.window[1] < 0 <= workload.window[0] and not workload.causal)
    return f"window {workload.window} looks ahead; the kernel has only causal windows" if ahead else None


def _slower_than_kernels(workload: Workload) -> str | None:
    """Return why plain products are not tried on a GPU that has kernels, or None.

    Over 257 random shapes on an H200 and two H100 they were never within 1.1 times of the fastest
    (docs/results/choice.md).
    """
    return None if workload.dtype == "float64" else f"plain products in {workload.dtype} are slower than any kernel"


def _has_others(workload: Workload) -> str | None:
    """Return why FlexAttention, which repeats the forward pass in the backward, is not tried, or None."""
    return None if workload.softcap is not None else "kernels that do not compile for each shape compute it"


def _better_by_tiles(workload: Workload) -> str | None:
    """Return why bfloat16 is not multiplied in float32 if the processor has tile registers for it, or None.

    On 16 cores of a Xeon with AMX torch's kernel took 0.4 to 0.9 of the time forward. In backward passes and windows,
    for which it has no kernel, it took as long or longer (docs/results/cpu.md). Few queries fill no tile.
    """
    few = workload.query_len is not None and workload.query_len * workload.group_size <= FEW_ROWS
    forward = workload.dtype == "bfloat16" and workload.mode == "forward" and workload.window == UNBOUNDED and not few
    return "torch's kernel multiplies it in tile registers" if forward and multiplies_bfloat16_tiles() else None


def _too_wide_for_cudnn(workload: Workload) -> str | None:
    """Return why cuDNN does not take the head dims, or None: above 128 it has kernels for compute capability 9.0."""
    widest = max(workload.head_dim, workload.value_width)
    if widest <= 128 or detect().compute_capability == 90:
        return None
    return f"head dim {widest} is above 128, which takes an H100 or H200"


ON_ANY_DEVICE = Capabilities(patterns=DENSE, devices=WORDS, value_dim=True, softcap=True)
WHEREVER = replace(ON_ANY_DEVICE, max_world_size=None, last_rows=True)

# FlashAttention on CUDA: half precision, head dim padded to a multiple of 8 inside, and values as wide as keys.
FLASH_ON_CUDA = Capabilities(patterns=DENSE, devices=CUDA, dtypes=HALF, max_head_dim=256, value_dim=True)
CAPPED_ON_CUDA = replace(FLASH_ON_CUDA, softcap=True)

BACKENDS = (
    Backend(
        "math",
        "plain PyTorch on any device, blocked over queries",
        "dilabench.backends.math:attend",
        "dilabench.backends.math:attend_backward",
        supports=ON_ANY_DEVICE,
        aliases=("standard",),
        aligns_ends=True,
        places_results=True,
        priority={"cpu": 10, "older": 10, "sm80": 10, "sm90": 10, "accelerator": 10},
        tried_for=replace(WHEREVER, on_cuda=replace(WHEREVER, check=_slower_than_kernels)),
    ),
    Backend(
        "sdpa-flash",
        "torch's own flash attention kernel (FlashAttention 2 on CUDA, a C++ kernel on CPU)",
        "dilabench.backends.sdpa.flash:attend",
        "dilabench.backends.sdpa.flash:attend_backward",
        packed_target="dilabench.backends.sdpa.flash_cuda:packed",
        supports=Capabilities(patterns=DENSE, value_dim=True, on_cuda=FLASH_ON_CUDA),
        requires=("cuda>=sm80|cpu",),
        kernels=(r"pytorch_flash::", r"_scaled_dot_product_flash_attention_for_cpu"),
        priority={"cpu": 20, "sm80": 30, "sm90": 30},
    ),
    Backend(
        "sdpa",
        "torch's scaled_dot_product_attention on other accelerators (mps, xpu), lse by plain products",
        "dilabench.backends.sdpa.dispatched:attend",
        "dilabench.backends.math:attend_backward",
        supports=Capabilities(patterns=DENSE, devices=frozenset({ACCELERATOR})),
        aligns_ends=True,
        priority={"accelerator": 20},
    ),
    Backend(
        "flash-cpu",
        "our own flash attention for CPUs, in C++ that is compiled for this processor at first use",
        "dilabench.backends.flash_cpu:attend",
        "dilabench.backends.flash_cpu:attend_backward",
        merging_target="dilabench.backends.flash_cpu:merging",
        supports=Capabilities(patterns=DENSE, devices=CPU, dtypes=HALF | {"float32"}, value_dim=True, softcap=True),
        requires=("cpu", "c++"),
        aligns_ends=True,
        places_results=True,
        priority={"cpu": 30},
        tried_for=replace(WHEREVER, check=_better_by_tiles),
    ),
    Backend(
        "sdpa-efficient",
        "torch's memory-efficient (cutlass) kernel",
        "dilabench.backends.sdpa.efficient:attend",
        "dilabench.backends.sdpa.efficient:attend_backward",
        packed_target="dilabench.backends.sdpa.efficient:packed",
        supports=Capabilities(
            patterns=DENSE, devices=CUDA, dtypes=HALF | {"float32"}, value_dim=True, check=_window_looks_ahead
        ),
        requires=("cuda>=sm70",),
        kernels=(r"fmha_cutlass[FB]",),
        priority={"older": 20, "sm80": 20, "sm90": 20},
    ),
    Backend(
        "sdpa-cudnn",
        "cuDNN's fused attention through torch",
        "dilabench.backends.sdpa.cudnn:attend",
        "dilabench.backends.sdpa.cudnn:attend_backward",
        supports=Capabilities(
            patterns=DENSE,
            devices=CUDA,
            dtypes=HALF,
            window=False,
            max_head_dim=256,
            value_dim=True,
            check=_too_wide_for_cudnn,
        ),
        requires=("cuda>=sm80",),
        kernels=(r"cudnn.*(sdpa|flash)",),
        priority={"sm90": 50},
    ),
    Backend(
        "flash2",
        "the flash-attn package (FlashAttention 2)",
        "dilabench.backends.flash2:attend",
        "dilabench.backends.flash2:attend_backward",
        packed_target="dilabench.backends.flash2:packed",
        supports=CAPPED_ON_CUDA,
        requires=("cuda>=sm80", "flash-attn>=2.7"),
        kernels=(r"flash_(fwd|bwd)_",),
        priority={"sm80": 40, "sm90": 40},
        library=True,
        install="pip install flash-attn --no-build-isolation",
        family="FlashAttention",
    ),
    Backend(
        "flash3",
        "FlashAttention 3 (module flash_attn_interface) on Hopper",
        "dilabench.backends.flash3:attend",
        "dilabench.backends.flash3:attend_backward",
        packed_target="dilabench.backends.flash3:packed",
        supports=CAPPED_ON_CUDA,
        requires=("cuda>=sm90", "flash_attn_interface"),
        kernels=(r"FlashAttn(Fwd|Bwd)Sm",),
        priority={"sm90": 60},
        library=True,
        family="FlashAttention",
    ),
    Backend(
        "flash4",
        "FlashAttention 4 (flash_attn.cute, CuTe DSL) on Hopper and newer",
        "dilabench.backends.flash4:attend",
        "dilabench.backends.flash4:attend_backward",
        packed_target="dilabench.backends.flash4:packed",
        supports=FLASH_ON_CUDA,
        requires=("cuda>=sm90", *FLASH_4),
        kernels=(r"flash_attn.?cute",),
        compiles=True,
        aligns_ends=True,
        places_results=True,
        priority={"sm90": 70},
        library=True,
        install="pip install 'dilabench[flash4]'",
        family="FlashAttention",
    ),
    Backend(
        "xformers",
        "xformers' memory-efficient attention; the library chooses its kernel",
        "dilabench.backends.xformers:attend",
        "dilabench.backends.xformers:attend_backward",
        supports=FLASH_ON_CUDA,
        requires=("cuda>=sm80", "xformers"),
        kernels=(r"flash_(fwd|bwd)|fmha_cutlass",),
        priority={"older": 15, "sm80": 25},
        library=True,
        install="pip install 'dilabench[xformers]'",
    ),
    Backend(
        "flex",
        "torch's FlexAttention, compiled; backward recomputes the forward",
        "dilabench.backends.flex:attend",
        "dilabench.backends.flex:attend_backward",
        packed_target="dilabench.backends.flex:packed",
        supports=Capabilities(
            patterns=DENSE,
            devices=CUDA,
            dtypes=HALF | {"float32"},
            max_head_dim=256,
            value_dim=True,
            softcap=True,
        ),
        requires=("cuda>=sm80", "triton"),
        kernels=(r"flex_attention",),
        compiles=True,
        priority={"sm80": 5, "sm90": 5},
        tried_for=replace(WHEREVER, check=_has_others),
        library=True,
    ),
)
