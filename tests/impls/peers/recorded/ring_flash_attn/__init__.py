"""Recorded from ring_flash_attn 0.1.8: its import needs a package that it does not ask for."""

import transformers_that_nobody_has  # noqa: F401
