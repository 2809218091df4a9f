"""Run by torchrun: ranks whose current device is the first attend on devices of their own."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from dilabench.attention import attention, ring_attention, sequence_shards

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device if sys.argv[1] == "bound" else None)
torch.cuda.set_device(0)
generator = torch.Generator().manual_seed(0)
whole = [torch.randn(1, 1024, 4, 64, generator=generator).to(device, torch.bfloat16) for _ in range(3)]
shards = sequence_shards(1024)
for _ in range(3):
    own = [shards.take(x).clone().requires_grad_() for x in whole]
    out = ring_attention(*own, shards, causal=True)
    gradients = torch.autograd.grad(out, own, torch.ones_like(out))
inputs = [x.requires_grad_() for x in whole]
expected = attention(*inputs, causal=True)
wanted = [expected, *torch.autograd.grad(expected, inputs, torch.ones_like(expected))]
for found, all_of_it in zip((out, *gradients), wanted, strict=True):
    torch.testing.assert_close(found, shards.take(all_of_it), atol=2e-2, rtol=2e-2)
assert torch.cuda.current_device() == 0
dist.barrier(device_ids=[rank])
dist.destroy_process_group()
