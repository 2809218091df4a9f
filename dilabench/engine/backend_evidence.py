"""Does a row's profile show the backend that the row claims? No torch."""

import re
from collections.abc import Iterable

from dilabench.plugins.descriptors import Backend
from dilabench.record import KernelUse

SHOWN = 5


def unproven_backend(backend: Backend, kernels: Iterable[KernelUse]) -> str | None:
    """Why the kernels that ran do not show this backend at work; None when one does, or when it names no kernels."""
    names = [use.name for use in kernels]
    if not backend.kernels or any(re.search(pattern, name) for pattern in backend.kernels for name in names):
        return None
    wanted = " or ".join(backend.kernels)
    ran = ", ".join(names[:SHOWN]) or "none"
    return f"claims {backend.name} but no such kernel ran: expected a match of {wanted}; ran: {ran}"
