"""Adapters of libraries that need a GPU or a build of their own, over their recorded signatures: held to the oracle."""

import pytest
import torch

from dilabench.contracts import BuildContext
from dilabench.distributed.sharding import Span, zigzag
from dilabench.distributed.shardings import HEADS_FOR_TOKENS, HEADS_IN_RING, WHOLE_ZIGZAG_RING
from dilabench.engine.verify import summary, verify
from dilabench.impls.peers import fla_nsa, flashinfer, flashinfer_vsa, nsa_pytorch
from dilabench.impls.peers.yunchang import usp_shards
from dilabench.workload.spec import Workload
from tests.conftest import slow

CONTEXT = BuildContext(device=torch.device("cpu"))
SHAPE = {"batch_size": 1, "seq_len": 97, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def told(build, **fields):
    one = Workload.model_validate({**SHAPE, **fields})
    return summary(verify(build(one, CONTEXT), one))


@pytest.mark.parametrize(("per_head", "heads"), [(False, 4), (True, 2)])
def test_flashinfer_is_given_the_blocks_of_the_mask(recorded, per_head, heads):
    pattern = {"kind": "block_sparse", "mask": "random", "block_size": 16, "sparsity": 0.6, "per_head": per_head}
    length = 97 if per_head else 96
    asked = {"pattern": pattern, "causal": False, "num_heads": heads, "seq_len": length}
    assert told(flashinfer.build, **asked).endswith("checks passed")


@pytest.mark.parametrize("per_head", [False, True])
def test_its_kernel_of_64_row_blocks_is_given_a_mask_for_each_head(recorded, per_head):
    pattern = {"kind": "block_sparse", "mask": "random", "block_size": 64, "sparsity": 0.6, "per_head": per_head}
    asked = {"pattern": pattern, "causal": False, "num_kv_heads": 4, "seq_len": 256, "mode": "forward"}
    assert told(flashinfer_vsa.build, **asked).endswith("checks passed")


@pytest.mark.parametrize("selector", ["random", "compressed"])
def test_parallel_nsa_is_given_the_blocks_of_each_token(recorded, selector):
    pattern = {"kind": "selected_blocks", "block_size": 16, "top_k": 4, "selector": selector}
    asked = {"pattern": pattern, "batch_size": 2, "num_heads": 32, "mode": "both"}
    assert told(fla_nsa.build, **asked).endswith("checks passed")


@pytest.mark.parametrize("selector", ["random", "compressed"])
def test_native_sparse_attend_is_given_the_blocks_besides_the_own_one(recorded, selector):
    pattern = {"kind": "selected_blocks", "block_size": 16, "top_k": 4, "selector": selector}
    asked = {"pattern": pattern, "batch_size": 2, "num_heads": 8, "mode": "both"}
    assert told(nsa_pytorch.build, **asked).endswith("checks passed")


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_peers_over_ranks_pass_the_oracle(recorded, ranks, launch):
    import peer_cases

    for verdicts in launch(peer_cases.recorded_verdicts, ranks):
        assert [one.endswith("checks passed") for one in verdicts.values()] == [True] * 2, verdicts


def test_usp_deals_the_chunks_of_a_ring_to_pairs():
    parts = usp_shards(96, 4).parts
    assert parts == ((Span(0, 24),), (Span(72, 96),), (Span(24, 48),), (Span(48, 72),))
    assert usp_shards(96, 2) == zigzag([(0, 96)], 2)


def test_their_bytes_follow_from_what_they_send():
    """Counted by hand for n = N/P = 24 rows of H = 8 query and K = 4 key/value heads, D = 16, 4 bytes each."""
    heads = {"num_heads": 8, "num_kv_heads": 4}
    one = Workload.model_validate({**SHAPE, **heads, "pattern": {"kind": "dense"}, "seq_len": 96, "mode": "both"})
    row = 16 * 4
    # q, k, v, out and their gradients, of which 3 of 4 ranks have the rest.
    assert HEADS_FOR_TOKENS.received_bytes(one, 4) == 24 * row * (8 + 4 + 4 + 8) * 2 * 3 // 4
    # K and V in three hops of each pass, their gradients in four.
    assert WHOLE_ZIGZAG_RING.received_bytes(one, 4) == 24 * row * (4 + 4) * (3 + 3 + 4)
    # In a pair half of each row; then one hop in a ring of two with half of the heads and 48 rows, and two back.
    pair = 24 * row * (8 + 4 + 4 + 8) * 2 // 2
    assert HEADS_IN_RING.received_bytes(one, 4) == pair + 48 * row * (2 + 2) * (1 + 1 + 2)
    assert HEADS_IN_RING.load_balance(one, 4) == WHOLE_ZIGZAG_RING.load_balance(one, 2)
    assert HEADS_IN_RING.received_bytes(one.replace(num_kv_heads=1), 4) is None
