"""Random inputs of a workload, made once per workload group and shared by its implementations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dilabench.workload.spec import Workload

TORCH_DTYPE = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


# Far apart among the seeds that torch's CPU generator tells apart, which has only their last 32 bits.
SEED_STEP, SEEDS = 0x9E3779B1, 2**32


@dataclass(frozen=True, slots=True)
class InputSet:
    """q [B, N, H, D], k and v [B, N, K, D]; or three times the same embeddings [B, N, H·D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def distinct(self) -> tuple[Tensor, ...]:
        """The tensors, each once."""
        return tuple({id(tensor): tensor for tensor in (self.q, self.k, self.v)}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct tensors."""
        return sum(tensor.nbytes for tensor in self.distinct)

    def copy(self) -> "InputSet":
        """The same numbers in tensors of their own."""
        copies = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.distinct}
        return InputSet(copies[id(self.q)], copies[id(self.k)], copies[id(self.v)])


def input_shapes(workload: Workload, takes: str, rows: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Shapes of q, k, v: [B, N, H, D] and [B, N, K, D], packed [T, H, D] and [T, K, D]; embeddings: one [B, N, H·D].

    `rows`: of the shards of a rank that holds so many positions.
    """
    rows = workload.seq_len if rows is None else rows
    lead: tuple[int, ...] = (workload.batch_size, rows)
    if workload.layout == "packed":
        lead = (rows,)
    if takes == "embeddings":
        return ((*lead, workload.num_heads * workload.head_dim),)
    query = (*lead, workload.num_heads, workload.head_dim)
    key = (*lead, workload.num_kv_heads, workload.head_dim)
    return query, key, key


def make_inputs(workload: Workload, takes: str, seed: int, device: torch.device, rows: int | None = None) -> InputSet:
    """Standard normal inputs. The same seed gives the same numbers on the same kind of device.

    `rows`: the shards of a rank that holds so many positions, drawn directly: the whole tensors exist nowhere.
    """
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPE[workload.dtype]
    wants_grad = workload.mode != "forward"
    made = [
        torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_(wants_grad)
        for shape in input_shapes(workload, takes, rows)
    ]
    return InputSet(*made) if len(made) == 3 else InputSet(made[0], made[0], made[0])


def rank_seed(seed: int, rank: int) -> int:
    """The seed of a rank's own shards; rank 0 has that of a single device."""
    return (seed + rank * SEED_STEP) % SEEDS


class InputStore:
    """The input sets of one workload. Asking for another workload's frees them, so that memory holds one only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workload: Workload | None = None
        self._sets: dict[tuple[str, int], InputSet] = {}

    def get(self, workload: Workload, takes: str, seed: int) -> InputSet:
        """The set of a seed."""
        if workload != self._workload:
            self._sets.clear()
            self._workload = workload
        key = (takes, seed)
        if key not in self._sets:
            self._sets[key] = make_inputs(workload, takes, seed, self._device)
        return self._sets[key]

    def clear(self) -> None:
        """Forget all sets."""
        self._sets.clear()
        self._workload = None
