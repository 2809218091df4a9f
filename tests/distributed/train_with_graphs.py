"""Trains the transformer of train_over_ranks.py; on GPUs each layer, with its messages, is one CUDA graph per pass."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_over_ranks import LENGTH, VOCABULARY, WIDTH, Block, Model

from dilabench.attention import SequenceShards, sequence_shards

BATCH, STEPS = 8, 5


class Layer(nn.Module):
    """A block over these shards: a function of tensors alone."""

    def __init__(self, block: Block, shards: SequenceShards) -> None:
        super().__init__()
        self.block, self.shards = block, shards

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.shards)


def train(model: Model, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    shards = sequence_shards(LENGTH)
    layers = tuple(Layer(block, shards) for block in model.blocks)
    if device.type == "cuda":
        samples = [torch.randn(BATCH, shards.rows, WIDTH, device=device, requires_grad=True) for _ in layers]
        layers = torch.cuda.make_graphed_callables(layers, tuple((sample,) for sample in samples))
    positions = shards.positions.to(device)
    for _ in range(STEPS):
        half = torch.randint(VOCABULARY, (BATCH, LENGTH // 2))
        whole = torch.cat([half, half], 1).to(device)
        tokens, following = shards.take(whole), shards.take(whole.roll(-1, 1))
        x = model.tokens(tokens) + model.places(positions)
        for layer in layers:
            x = layer(x)
        loss = cross_entropy(model.head(x).flatten(0, 1), following.flatten(), reduction="sum") / whole.numel()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{total:.6f}")


if __name__ == "__main__":
    where = torch.device(sys.argv[1], int(os.environ["LOCAL_RANK"]) if sys.argv[1] == "cuda" else None)
    torch.manual_seed(0)
    copier = Model().to(where)
    adam = torch.optim.AdamW(copier.parameters(), lr=3e-3)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    train(copier, adam, where)
    dist.destroy_process_group()
