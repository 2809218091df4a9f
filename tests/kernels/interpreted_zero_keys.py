"""Run by test_packing.py under TRITON_INTERPRET=1: zero keys of random packings, of all branches together and of each,
against those of the oracle. Prints, as JSON, the number of packings with zero keys and the largest difference.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import accumulate
from random import Random

os.environ["TRITON_INTERPRET"] = "1"

import torch
from pydantic import ValidationError

from dilabench.impls.null_mass import log_zero_keys
from dilabench.kernels.fused.zero_keys import ZeroKeysOfDocuments
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


def differences(seed: int) -> list[float]:
    """Of each form that has zero keys; inf where one has some and the other none."""
    choose, device = Random(seed), torch.device("cpu")
    lengths = [choose.choice((1, 2, 15, 16, 17, 33, choose.randint(1, 100))) for _ in range(choose.randint(2, 6))]
    bounds = tuple(accumulate(lengths, initial=0))
    heads = choose.choice(("all", "grouped"))
    pattern = DilatedPattern(
        segment_lengths=(choose.choice((12, 24, 48)), choose.choice((60, 120, 30, 400))),
        dilation_rates=(choose.choice((1, 2, 3, 4)), choose.choice((2, 5, 6))),
        padding="zero_key",
        heads=heads,
        offset=choose.choice(("modulo", "blocked")),
        offset_by=choose.choice(("head", "kv_head")),
    )
    shape = {"batch_size": 1, "seq_len": bounds[-1], "num_heads": 6, "num_kv_heads": 2, "head_dim": 16}
    try:
        workload = Workload(pattern=pattern, causal=False, layout="packed", cu_seqlens=bounds, **shape)
    except ValidationError:
        # torchscale's function is defined for no such length.
        return []
    of_documents = ZeroKeysOfDocuments(pattern.branches, pattern.residues(6, 2), device)
    # Some documents are empty.
    edges = torch.tensor(sorted((*bounds, *choose.choices(bounds, k=2))), dtype=torch.int32)
    found = []
    for apart in {False, heads == "all"}:
        mine = of_documents(edges, bounds[-1], apart)
        right = log_zero_keys(workload, device, apart=apart)
        if right is None:
            right = torch.full((len(mine), 6, bounds[-1]), -torch.inf)
        else:
            found.append(0.0)
        together = torch.cat([x.reshape(1, 6, -1) for x in mine])
        aligned = all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in mine)
        same = aligned and torch.equal(together.isinf(), right.isinf())
        found.append((together.exp() - right.exp()).abs().max().item() if same else torch.inf)
    return found


if __name__ == "__main__":
    found = [differences(seed) for seed in range(60)]
    compared = sum(len(each) > 1 for each in found)
    sys.stdout.write(json.dumps({"compared": compared, "largest": max(max(each, default=0.0) for each in found)}))
