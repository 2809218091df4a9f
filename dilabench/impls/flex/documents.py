"""`flex-documents`: torch's FlexAttention over packed documents, as one writes it by hand.

The mask compares document ids, or for dilated branches ids of segment and residue; the score counts branches.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

from dilabench.contracts import BuildContext
from dilabench.impls.flex.flex import Flex, Index, over_counts
from dilabench.patterns.dilated import DilatedPattern
from dilabench.workload.spec import Workload


def build(workload: Workload, context: BuildContext) -> Flex:
    """Dense or dilated attention over packed sequences; otherwise as `flex.build`."""
    return over_counts(workload, context, lambda _: _count(workload, context.device))


def _count(workload: Workload, device: torch.device) -> Index:
    """How many branches show key j to query i in head h; document ids are enough without branches."""
    starts, stops = np.array(workload.sequences).T
    documents = np.repeat(np.arange(len(starts)), stops - starts)
    positions = np.arange(workload.seq_len) - starts[documents]
    pattern = DilatedPattern.match(workload.pattern)
    if pattern is None:
        ids = torch.from_numpy(documents.astype(np.int32)).to(device)
        return lambda _h, i, j: (ids[i] == ids[j]).to(torch.int32)
    # Two tokens are in the same rows of a branch if segment and residue are equal: one id for both.
    residues = [positions % segment % rate for segment, rate in pattern.branches]
    rows = [
        documents * (workload.seq_len * rate) + positions // segment * rate + residue
        for residue, (segment, rate) in zip(residues, pattern.branches, strict=True)
    ]
    own = torch.from_numpy(np.stack([np.unique(x, return_inverse=True)[1] for x in rows]).astype(np.int32)).to(device)
    residue_of = torch.from_numpy(np.stack(residues).astype(np.int32)).to(device)
    of_head = torch.tensor(
        pattern.residues(workload.num_heads, workload.num_kv_heads), dtype=torch.int32, device="cpu"
    ).to(device)
    branches = range(len(pattern.branches))

    def count(h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = ((own[b, i] == own[b, j]) & (residue_of[b, i] == of_head[b, h]) for b in branches)
        return reduce(add, (x.to(torch.int32) for x in seen))

    return count
