"""Implementations and backends that can be used on this machine, and why others cannot."""

from dilabench.choice.descriptors import unmet, wrong_device
from dilabench.machine import Machine
from dilabench.plugins.descriptors import ANY_PATTERN, DENSE_KERNEL, Backend, Capabilities, Implementation, Timer

# The most that an implementation can support; for a backend, DENSE_KERNEL.
EVERYTHING = Capabilities(
    patterns=ANY_PATTERN,
    layouts=frozenset({"padded", "packed"}),
    merge_grads=frozenset({"exact", "detached"}),
    max_world_size=None,
)


def reasons_against(descriptor: object, machine: Machine) -> tuple[str, ...]:
    """Return why a descriptor cannot be used here for any workload; empty if it can."""
    if isinstance(descriptor, Implementation | Backend):
        return unmet(descriptor.requires, machine) or wrong_device(descriptor.supports.devices, machine)
    if isinstance(descriptor, Timer):
        return wrong_device(descriptor.devices, machine)
    return ()


def limits_of(descriptor: Implementation | Backend) -> tuple[str, ...]:
    """Return what it cannot compute although its kind could."""
    return limits(descriptor.supports, DENSE_KERNEL if isinstance(descriptor, Backend) else EVERYTHING)


def limits(supports: Capabilities, widest: Capabilities = EVERYTHING) -> tuple[str, ...]:
    """Return the limits of an implementation or backend as text, relative to the most that its kind can support."""
    found: list[str] = []
    for name in ("patterns", "devices", "dtypes", "modes", "layouts", "merge_grads", "causal"):
        offered = getattr(supports, name)
        if offered != getattr(widest, name):
            found.append(f"{name}: {', '.join(sorted(map(str, offered)))}")
    found += [
        f"no {name.replace('_', ' ')}" for name in ("window", "gqa", "grouped_heads") if not getattr(supports, name)
    ]
    if supports.head_dim_multiple != 1:
        found.append(f"head dim: multiples of {supports.head_dim_multiple}")
    if supports.max_head_dim is not None:
        found.append(f"head dim: up to {supports.max_head_dim}")
    if supports.max_world_size is not None and widest.max_world_size is None:
        found.append("one device" if supports.max_world_size == 1 else f"up to {supports.max_world_size} devices")
    if supports.on_cuda is not None:
        other = [
            limit
            for limit in limits(supports.on_cuda, widest)
            if limit not in found and not limit.startswith("devices")
        ]
        found.append(f"on CUDA {', '.join(other)}")
    return tuple(found)
