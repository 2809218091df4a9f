"""Recorded from yunchang 0.6.4, whose import asks the GPU for its kind."""

import flash_attn_that_nobody_has  # noqa: F401
