"""DDP or FSDP2 around the transformer of train_over_ranks.py: one mesh axis for batches, the other for tokens."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from train_over_ranks import LENGTH, VOCABULARY, Model

from dilabench.attention import sequence_shards

BATCH, STEPS = 8, 5


def train(kind: str, over_tokens: int) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // over_tokens, over_tokens), mesh_dim_names=("data", "tokens"))
    model: torch.nn.Module = Model().double()
    if kind == "ddp":
        # Parameters are the same on all ranks of both axes.
        model = DistributedDataParallel(model)
    else:
        everyone = mesh["data", "tokens"]._flatten("everyone")
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # The tokens of a batch lie on the ranks of one row of the mesh.
    shards = sequence_shards(LENGTH, group=mesh["tokens"])
    for _ in range(STEPS):
        half = torch.randint(VOCABULARY, (BATCH, LENGTH // 2))
        whole = torch.cat([half, half], 1)
        own = whole.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
        tokens, following = shards.take(own), shards.take(own.roll(-1, 1))
        summed = cross_entropy(model(tokens, shards).flatten(0, 1), following.flatten(), reduction="sum")
        # DDP and FSDP2 take the mean of the gradients of all ranks, and the loss is the mean over all tokens.
        (ranks * summed / whole.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = summed.detach() / whole.numel()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{total:.12f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
