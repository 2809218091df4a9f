"""Tells dilabench of an implementation that can be made slower, to see whether `check` notices."""

from dilabench.plugins import Capabilities, Implementation, hookimpl


@hookimpl
def dilabench_register_implementations() -> list[Implementation]:
    return [
        Implementation(
            "slowed",
            "strided, which repeats a share of its batch where DILABENCH_SLOWED_SHARE says so",
            "dilabench_slowed.slowed:build",
            supports=Capabilities(patterns=frozenset({"dilated"})),
            uses_backend=True,
        )
    ]
