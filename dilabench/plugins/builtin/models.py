"""A model's step by attention, as data. The models that have a name are presets (`workloads`)."""

from dataclasses import replace
from typing import Any

from dilabench.choice.implementations import BOTH_LAYOUTS, BOTH_MERGES, CUDA, DENSE, HALF
from dilabench.plugins.builtin.peers import FLASH_ATTN_2, STAND_IN, TORCHSCALE
from dilabench.plugins.descriptors import ANY_PATTERN, Capabilities, Implementation
from dilabench.workload.model import ITSELF
from dilabench.workload.spec import UNBOUNDED, Workload

BUILDERS = "dilabench.compat.transformers.model"
TRANSFORMERS = "transformers>=5.24"
_PLAIN = Capabilities(
    patterns=DENSE,
    layouts=BOTH_LAYOUTS,
    modes=frozenset({"forward", "both"}),
    window=False,
    causal=frozenset({True}),
    last_rows=True,
    softcap=True,
)


def _without_window(workload: Workload) -> str | None:
    return None if workload.window == UNBOUNDED else f"window {workload.window}: the model's own layers say theirs"


def _without_sdpa(workload: Workload) -> str | None:
    has_none = workload.model is not None and workload.model.sdpa is False
    return "transformers refuses sdpa for this model, which has sinks or caps scores" if has_none else None


def _without_padding(workload: Workload) -> str | None:
    is_whole = workload.model is None or workload.model.lengths is None
    return None if is_whole else "it takes no mask, so that it would see padding"


def _only_itself(workload: Workload) -> str | None:
    return None if workload.window == ITSELF else "it has no attention, so that it is what a window of 0,0 gives"


TRANSFORMERS_STEPS: tuple[Implementation, ...] = (
    Implementation(
        "eager-model",
        "a model's step with eager attention of transformers, a mask for every pair: what others are compared with",
        f"{BUILDERS}:build_eager",
        supports=replace(_PLAIN, patterns=ANY_PATTERN, window=True, merge_grads=BOTH_MERGES),
        requires=(TRANSFORMERS,),
        takes="model",
        role="oracle",
    ),
    Implementation(
        "eager-rows-model",
        "a model's step with eager attention of 512 queries at a time: a reference where sdpa is refused",
        f"{BUILDERS}:build_eager_rows",
        supports=replace(_PLAIN, layouts=frozenset({"padded"}), check=_without_padding),
        requires=(TRANSFORMERS,),
        takes="model",
        role="oracle",
    ),
    Implementation(
        "sdpa-model",
        "a model's step with torch's scaled_dot_product_attention",
        f"{BUILDERS}:build_sdpa",
        supports=replace(_PLAIN, softcap=False, check=_without_sdpa),
        requires=(TRANSFORMERS,),
        takes="model",
        role="plain",
    ),
    Implementation(
        "flash2-model",
        "a model's step with FlashAttention 2 in transformers (`flash_attention_2`)",
        f"{BUILDERS}:build_flash2",
        supports=replace(_PLAIN, devices=CUDA, dtypes=HALF),
        requires=(TRANSFORMERS, "cuda>=sm80", "flash_attn>=2.3"),
        takes="model",
    ),
    Implementation(
        "flex-model",
        "a model's step with torch's FlexAttention in transformers (`flex_attention`)",
        f"{BUILDERS}:build_flex",
        supports=replace(_PLAIN, devices=CUDA),
        requires=(TRANSFORMERS, "cuda>=sm80", "triton"),
        takes="model",
        compiles=True,
    ),
    Implementation(
        "dilabench-model",
        "a model's step with dilabench's attention, of any pattern",
        f"{BUILDERS}:build_dilabench",
        supports=replace(_PLAIN, patterns=ANY_PATTERN, window=True, check=_without_window),
        requires=(TRANSFORMERS,),
        takes="model",
    ),
    Implementation(
        "identity-model",
        "a model's step with values instead of attention: what remains of it",
        f"{BUILDERS}:build_identity",
        supports=replace(_PLAIN, window=True, check=_only_itself),
        requires=(TRANSFORMERS,),
        takes="model",
        role="yardstick",
    ),
)

TORCHSCALE_BUILDERS = "dilabench.compat.torchscale_model"
_LONGNET = replace(TORCHSCALE.supports, layouts=frozenset({"padded"}), modes=frozenset({"forward", "both"}))
_WITH_WINDOW = replace(_LONGNET, window=True)
_OF_TORCHSCALE: dict[str, Any] = {
    "requires": TORCHSCALE.requires,
    "takes": "model",
    "project": TORCHSCALE.project,
    "install": TORCHSCALE.install,
}

TORCHSCALE_STEPS: tuple[Implementation, ...] = (
    Implementation(
        "torchscale-eager-model",
        "a step of LongNet's encoder or decoder, torchscale's own attention over plain products of all scores",
        f"{TORCHSCALE_BUILDERS}:build_plain",
        supports=_WITH_WINDOW,
        role="oracle",
        **_OF_TORCHSCALE,
    ),
    Implementation(
        "torchscale-model",
        "a step of LongNet's encoder or decoder as torchscale has it, branch by branch through flash-attn",
        f"{TORCHSCALE_BUILDERS}:build_torchscale",
        supports=_LONGNET,
        role="plain",
        uses_backend=True,
        backends=FLASH_ATTN_2,
        quirks=(STAND_IN,),
        **_OF_TORCHSCALE,
    ),
    Implementation(
        "torchscale-dilabench-model",
        "the same with dilabench's attention (`compat.torchscale.patch`)",
        f"{TORCHSCALE_BUILDERS}:build_dilabench",
        supports=_LONGNET,
        **_OF_TORCHSCALE,
    ),
    Implementation(
        "torchscale-identity-model",
        "the same with values instead of attention: what remains of it",
        f"{TORCHSCALE_BUILDERS}:build_identity",
        supports=_WITH_WINDOW,
        role="yardstick",
        **_OF_TORCHSCALE,
    ),
)

MODEL_STEPS = (*TRANSFORMERS_STEPS, *TORCHSCALE_STEPS)
