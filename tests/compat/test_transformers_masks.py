"""The masks that models of transformers get: tensors with transformers' own numbers, and what they consist of."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="needs [test]: transformers is not installed")

from transformers import masking_utils  # noqa: E402

from dilabench.compat import transformers as integration  # noqa: E402

B, N = 2, 12
PADDING = {
    "none": None,
    "all ones": torch.ones(B, N),
    "left": torch.tensor([[0] * 4 + [1] * 8, [1] * 12]),
    "right": torch.tensor([[1] * 7 + [0] * 5, [1] * 12]),
    "holes": torch.tensor([[1, 0, 1, 1, 0, 1] * 2, [0, 1] * 6]),
    "a row of padding": torch.tensor([[0] * 12, [1] * 12]),
}
NUMBERS = {
    "ascending": [[0] * 3 + [1] * 5 + [2] * 4, [0] * 12],
    "again": [[0] * 3 + [1] * 3 + [0] * 6, [5] * 6 + [2] * 6],
    "-1 at the end": [[0] * 8 + [-1] * 4, [0] * 11 + [-1]],
    "-1 at both ends": [[0] * 10 + [-1] * 2, [-1] * 2 + [0] * 10],
    "alternating": [[0, 1] * 6, [3, 2, 1] * 4],
}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    integration.register()
    integration.interface._said.clear()
    yield
    for table in (integration.interface.ALL_ATTENTION_FUNCTIONS, integration.interface.ALL_MASK_ATTENTION_FUNCTIONS):
        del table._global_mapping["dilabench"]


def _made(function: Callable[..., Any], name: str, padding: Tensor | None = None, **options: Any) -> Any:
    config = transformers.MistralConfig(sliding_window=4, num_hidden_layers=1)
    config._attn_implementation = name
    options = {"attention_mask": padding, "cache": None, **options}
    return function(config, torch.zeros(B, N, 4, dtype=torch.float64), **options)


FUNCTIONS = {
    "causal": masking_utils.create_causal_mask,
    "window": masking_utils.create_sliding_window_causal_mask,
    "bidirectional": masking_utils.create_bidirectional_mask,
    "window of both sides": masking_utils.create_bidirectional_sliding_window_mask,
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_masks_have_the_numbers_of_eager_attention(function: str, padding: str) -> None:
    expected, found = (_made(FUNCTIONS[function], name, PADDING[padding]) for name in ("eager", "dilabench"))
    assert isinstance(found, integration.masks.Mask)
    assert isinstance(found, Tensor)
    assert (found.ndim, found.dtype, found.shape) == (4, torch.float64, (B, 1, N, N))
    assert torch.equal(found + 0, torch.zeros(B, 1, N, N, dtype=torch.float64) if expected is None else expected)


@pytest.mark.parametrize("function", ["causal", "window"])
def test_restarting_positions_have_the_numbers_of_eager_attention(function: str) -> None:
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    expected, found = (_made(FUNCTIONS[function], name, position_ids=positions) for name in ("eager", "dilabench"))
    assert torch.equal(found.dense(), expected)


TOUCHED: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda mask: mask[:, 0],
    "slice of keys": lambda mask: mask[..., :5],
    "slice of rows": lambda mask: mask[:, :, 2:7],
    "last rows": lambda mask: mask[:, :, -3:, :],
    "added": lambda mask: mask + 1,
    "compared": lambda mask: (mask == 0) & True,
    "cast": lambda mask: mask.to(torch.bool),
    "joined": lambda mask: torch.cat([mask, mask], -1),
    "expanded": lambda mask: mask.expand(B, 3, N, N),
    "filled": lambda mask: mask.masked_fill(torch.eye(N).bool(), 1.0),
    "detached": lambda mask: mask.detach(),
    "moved": lambda mask: mask.to("cpu"),
    "copied": lambda mask: mask.clone(),
}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("touch", TOUCHED)
def test_a_touched_mask_is_a_tensor(touch: str, padding: str) -> None:
    mask = _made(FUNCTIONS["window"], "dilabench", PADDING[padding])
    found, expected = TOUCHED[touch](mask), TOUCHED[touch](mask.dense().clone())
    assert torch.equal(found.clone(), expected)


def _attend(mask: Any, rows: int = N, keys: int = N, **options: Any) -> tuple[Tensor, Tensor]:
    """out [B, M, H, D] of dilabench and of torch's attention with the numbers of the mask."""
    torch.manual_seed(0)
    q = torch.randn(B, 4, rows, 8, dtype=torch.float64)
    k, v = (torch.randn(B, 2, keys, 8, dtype=torch.float64) for _ in range(2))
    module = nn.Module()
    module.num_key_value_groups = 2
    found, _ = integration.interface.ALL_ATTENTION_FUNCTIONS["dilabench"](module, q, k, v, mask, **options)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask + 0).transpose(1, 2)
    return found, expected


def test_a_mask_that_a_model_wrote_to_is_taken_as_it_is() -> None:
    mask = _made(FUNCTIONS["causal"], "dilabench")
    mask[:, 0, :, 2] = -1e9
    mask[:, :, 2, 2] = 0
    module = nn.Module()
    module.num_key_value_groups = 2
    q, k, v = (torch.randn(B, heads, N, 8, dtype=torch.float64) for heads in (4, 2, 2))
    found, _ = integration.interface.ALL_ATTENTION_FUNCTIONS["dilabench"](module, q, k, v, mask)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense()).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match=r"writes to a whole mask of dilabench; write to mask\.clone"):
        mask += 1


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("function", ["causal", "bidirectional"])
def test_documents_are_known_by_their_numbers(
    function: str, padding: str, numbers: str, calls: list[dict[str, Any]]
) -> None:
    """Equal numbers attend to each other, wherever they are, and bounds are kept next to padding."""
    documents = masking_utils.packed_sequence_mask_function(torch.tensor(NUMBERS[numbers]))
    mask = _made(FUNCTIONS[function], "dilabench", PADDING[padding], and_mask_function=documents)
    found, expected = _attend(mask)
    seen = torch.ones(B, N).bool() if PADDING[padding] is None else PADDING[padding].bool()
    torch.testing.assert_close(found[seen], expected[seen])
    assert len(calls) == 1


def test_two_windows_or_documents_of_two_kinds_are_both_kept(caplog: pytest.LogCaptureFixture) -> None:
    both = masking_utils.and_masks(
        *(masking_utils.packed_sequence_mask_function(torch.tensor(NUMBERS[name])) for name in ("ascending", "again"))
    )
    mask = _made(FUNCTIONS["causal"], "dilabench", and_mask_function=both)
    module = nn.Module()
    q, k, v = (torch.randn(B, 4, N, 8, dtype=torch.float64) for _ in range(3))
    found, _ = integration.interface.ALL_ATTENTION_FUNCTIONS["dilabench"](module, q, k, v, mask)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask + 0).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    assert "the model's mask function and_masks has parts besides" in caplog.text


# Calls of attention over fewer queries than keys, some of them padding: neighbours of equal padding are one.
CALLS = {"none": 1, "all ones": 1, "left": 2, "a row of padding": 2, "right": 0, "holes": 0}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("function", ["causal", "window"])
@pytest.mark.parametrize("rows", [1, 3, 10, N])
def test_the_last_rows_of_a_mask_are_the_last_rows_of_attention(
    function: str, rows: int, padding: str, calls: list[dict[str, Any]]
) -> None:
    """Also if some of the queries are padding."""
    mask = _made(FUNCTIONS[function], "dilabench", PADDING[padding])[:, :, -rows:, :]
    found, expected = _attend(mask, rows=rows)
    seen = torch.ones(B, N).bool() if PADDING[padding] is None else PADDING[padding].bool()
    torch.testing.assert_close(found[seen[:, -rows:]], expected[seen[:, -rows:]])
    if rows < N:
        # Without padding among the queries one call has all.
        assert len(calls) == (CALLS[padding] if rows > seen.sum(1).min() else min(1, CALLS[padding]))
        if CALLS[padding]:
            assert not found[~seen[:, -rows:]].any()


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("rows", [3, N, 15])
def test_queries_of_another_sequence_see_the_keys_that_are_no_padding(
    rows: int, padding: str, calls: list[dict[str, Any]]
) -> None:
    options = {"mask_function": masking_utils.bidirectional_mask_function, "dtype": torch.float64}
    sizes = {"batch_size": B, "q_length": rows, "kv_length": N}
    given = PADDING[padding]
    mask = integration.masks.mask(**sizes, **options, attention_mask=None if given is None else given.bool())
    found, expected = _attend(mask, rows=rows)
    has_keys = torch.ones(B).bool() if PADDING[padding] is None else PADDING[padding].bool().any(1)
    torch.testing.assert_close(found[has_keys], expected[has_keys])
    assert len(calls) == (padding != "holes")


def _forward(x: Tensor, mask: Tensor) -> Tensor:
    out: Tensor = integration.interface.ALL_ATTENTION_FUNCTIONS["dilabench"](nn.Module(), x, x, x, mask)[0]
    return out


@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_mask_enters_a_compiled_layer(padding: str) -> None:
    """A layer that is compiled alone gets masks that were made outside, and one graph serves all of a kind."""
    graphs = 0

    def counted(graph: Any, _inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    layer = torch.compile(_forward, backend=counted, fullgraph=True)
    x = torch.randn(B, 4, N, 8, dtype=torch.float64)
    for shift in (0, 1):
        mask = PADDING[padding]
        mask = _made(FUNCTIONS["window"], "dilabench", None if mask is None else mask.roll(shift, 0))
        torch.testing.assert_close(layer(x, mask), _forward(x, mask))
    assert graphs == 1
    torch._dynamo.reset()
