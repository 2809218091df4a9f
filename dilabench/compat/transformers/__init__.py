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

    A cache, fewer queries than keys, cross-attention and selections of a model (DSA, MSA) are computed, too. If keys
    come from a cache or another sequence, rows of a batch with padding of different lengths are separate calls.

    torch's SDPA computes calls with masks of other forms, padding between the tokens of a cache, dropout or position
    biases; on a GPU also calls with a cache and unequal padding, and steps with a static cache. The logger
    `dilabench.compat.transformers` names each model and reason once; DILABENCH_STRICT=1 makes it a ValueError. With a
    `pattern`, which SDPA cannot compute, such a call always raises ValueError, and so do unknown keywords. With a
    softcap, which SDPA lacks, plain products compute it. Under torch.compile SDPA also computes calls with padding,
    windows, caches or position ids that restart; with `cu_seq_lens_q` any packing is one graph of dilabench.

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
