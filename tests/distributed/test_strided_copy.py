"""Copies in long words: every element arrives, nothing beside the target changes, words are as long as can be."""

import pytest
import torch

from dilabench.distributed.transport.strided_copy import copy_strided_

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
# What of [2, 9, 3, D] is copied: in another order of axes, some rows, some heads, one column, all of it.
SOURCES = {
    "rows first": lambda x: x.transpose(0, 1),
    "some rows": lambda x: x[:, 5:],
    "some heads": lambda x: x[:, :, 1:],
    "one column": lambda x: x[..., :1],
    "columns first": lambda x: x.transpose(2, 3),
    "from an odd place": lambda x: x.flatten()[1:],
    "nothing": lambda x: x[:, :0],
}


def numbers(*shape, dtype):
    return (torch.arange(torch.Size(shape).numel()) % 251).to(dtype).view(shape)


@pytest.mark.parametrize("head_dim", [1, 3, 4, 8, 24, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_every_element_arrives_and_nothing_else_changes(name, dtype, head_dim):
    source = SOURCES[name](numbers(2, 9, 3, head_dim, dtype=dtype))
    for margin in (0, 1, 8):
        whole = torch.full((source.numel() + 2 * margin,), 7, dtype=dtype)
        target = whole[margin : margin + source.numel()].view(source.shape)
        copy_strided_(target, source)
        assert torch.equal(target, source)
        assert bool((whole[:margin] == 7).all())
        assert bool((whole[margin + source.numel() :] == 7).all())


def test_a_single_number():
    target = torch.tensor(1.0)
    copy_strided_(target, torch.tensor(2.0))
    assert target == 2.0


@pytest.mark.parametrize(
    ("dtype", "head_dim", "word"),
    [
        (torch.bfloat16, 128, torch.complex128),
        (torch.bfloat16, 20, torch.int64),
        (torch.bfloat16, 6, torch.int32),
        (torch.bfloat16, 3, torch.bfloat16),
        (torch.float64, 6, torch.complex128),
    ],
)
def test_words_are_as_long_as_rows_allow(dtype, head_dim, word, monkeypatch):
    seen = []
    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: seen.append(self.dtype) or copy_(self, source))
    source = numbers(2, 9, 3, head_dim, dtype=dtype).transpose(0, 1)
    copy_strided_(torch.empty(source.shape, dtype=dtype), source)
    assert seen == [word]
