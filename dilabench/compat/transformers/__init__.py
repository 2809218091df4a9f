"""dilabench's attention in models of transformers (Llama, Qwen, Mistral, gpt-oss and others with its interface).

    from dilabench.compat.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="dilabench")

Batches are plain, padded, or packed by `DataCollatorWithFlattening`.
"""

from dilabench.contracts import Attend
from dilabench.patterns.pattern import Pattern

__all__ = ["register"]


def register(name: str = "dilabench", *, pattern: Pattern | None = None, backend: str | Attend = "auto") -> str:
    """Add dilabench to the attention interface of transformers as `name`, which is returned.

    `pattern` None is dense attention; another, such as `DilatedPattern`, restarts in each document and in each row of a
    padded batch. `backend` is that of `dilabench.attention.attention`. Causality, sliding windows, grouped heads, sinks
    (gpt-oss), softcaps (Gemma 2), value widths (MLA) and scales come from the model, documents from `cu_seq_lens_q` or
    from position ids that restart. Rows of padding are 0.

    A cache, fewer queries than keys, cross-attention and what a model selects (DSA, MSA) are computed, too. Rows of a
    batch whose padding ends at different tokens are calls of their own if keys are a cache's or another sequence's.
    Masks of other forms, padding between the tokens of a cache, on a GPU also unequal padding next to a cache and steps
    with a static one, dropout and position biases go to torch's SDPA, which the logger `dilabench.compat.transformers`
    says once for each model and reason; DILABENCH_STRICT=1 makes it a ValueError. With a `pattern`, which SDPA does not
    compute, it always is one, and so are keywords that dilabench does not know. With a softcap, which SDPA lacks, plain
    products compute what would go to it. Under torch.compile padding, windows, caches and position ids that restart go
    to SDPA; with `cu_seq_lens_q` they are computed, and any packing is the same graph.

    Raises ImportError without transformers (extra `transformers`), ValueError for a name that transformers itself
    uses, such as 'sdpa', for a pattern of another type than `dilabench.patterns` has, and for a pattern that needs
    indices or gates from the caller.
    """
    try:
        from dilabench.compat.transformers.interface import add
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise ImportError(f"{error}; install dilabench with its extra: pip install 'dilabench[transformers]'") from None
    add(name, pattern, backend)
    return name
