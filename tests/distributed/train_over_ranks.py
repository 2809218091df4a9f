"""Trains a small transformer to copy, its sequences over all ranks; prints the loss of every step."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dilabench.attention import SequenceShards, ring_attention, sequence_shards

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 16, 32, 4, 48, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, shards: SequenceShards) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).chunk(3, dim=2)
        x = x + self.out(ring_attention(q, k, v, shards, causal=True).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, shards: SequenceShards) -> Tensor:
        x = self.tokens(tokens) + self.places(shards.positions)
        for block in self.blocks:
            x = block(x, shards)
        return self.head(x)


def train(model: Model, optimizer: torch.optim.Optimizer) -> None:
    shards = sequence_shards(LENGTH)
    for _ in range(STEPS):
        half = torch.randint(VOCABULARY, (8, LENGTH // 2))
        whole = torch.cat([half, half], 1)
        tokens, following = shards.take(whole), shards.take(whole.roll(-1, 1))
        # The mean over the tokens of all ranks: each rank has its share of it, and of its gradient.
        loss = cross_entropy(model(tokens, shards).flatten(0, 1), following.flatten(), reduction="sum") / whole.numel()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{total:.12f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    copier = Model().double()
    # What optimizers import keeps a process group that is there already, and with it threads that outlive its end.
    adam = torch.optim.AdamW(copier.parameters(), lr=3e-3)
    dist.init_process_group("gloo")
    train(copier, adam)
    dist.destroy_process_group()
