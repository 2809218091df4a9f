"""`strided`, and where an environment variable says so the same once more for a share of the sequences."""

import os

from torch import Tensor

from dilabench.contracts import AttentionFn, BuildContext
from dilabench.impls import strided
from dilabench.workload.spec import Workload

SHARE_VARIABLE = "DILABENCH_SLOWED_SHARE"


def build(workload: Workload, context: BuildContext) -> AttentionFn:
    attention = strided.build(workload, context)
    repeated = round(float(os.environ.get(SHARE_VARIABLE, "0")) * workload.batch_size)
    if not repeated:
        return attention
    part = strided.build(workload.model_copy(update={"batch_size": repeated}), context)

    def slower(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        part(q[:repeated], k[:repeated], v[:repeated])
        return attention(q, k, v)

    return slower
