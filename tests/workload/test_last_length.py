"""How long sequences may get hangs on the pattern alone."""

import pytest

from dilabench.workload.last_length import last_length
from dilabench.workload.spec import MAX_SEQ_LEN, Workload

ZERO_KEYS = {"kind": "dilated", "segment_lengths": (8, 12), "dilation_rates": (1, 8), "padding": "zero_key"}


@pytest.mark.parametrize(("pattern", "last"), [({"kind": "dense"}, MAX_SEQ_LEN), (ZERO_KEYS, 12)])
def test_the_next_one_is_refused(pattern: dict[str, object], last: int) -> None:
    fields = {"batch_size": 1, "num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "causal": False}
    workload = Workload.model_validate({"pattern": pattern, "seq_len": 10, "dtype": "float32", **fields})
    assert last_length(workload) == last
    assert workload.replace(seq_len=last)
    with pytest.raises(ValueError, match=r"seq_len|positions"):
        workload.replace(seq_len=last + 1)


def test_sequences_that_are_given_get_no_longer() -> None:
    fields = {"batch_size": 1, "num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "causal": False, "dtype": "float32"}
    packed = {"pattern": {"kind": "dense"}, "layout": "packed", "cu_seqlens": (0, 4, 10), "seq_len": 10}
    assert last_length(Workload.model_validate({**packed, **fields})) == 10
