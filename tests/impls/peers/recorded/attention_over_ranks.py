"""Plain attention of local rows over the keys of all ranks, for recorded packages that compute over ranks."""

import torch
import torch.distributed as dist


class Gathered(torch.autograd.Function):
    """[ranks, ...] of every rank's tensor; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        everyone = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, x.contiguous(), group=group)
        return torch.stack(everyone)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


def attend(q, k, v, positions, causal, scale, group=None):
    """out [B, n, H, D] and lse [B, n, H] of this rank's rows; `positions` [n] are where they stand."""
    k, v = (Gathered.apply(x, group).transpose(0, 1).flatten(1, 2) for x in (k, v))
    everywhere = Gathered.apply(positions, group).flatten()
    visible = positions[:, None] >= everywhere if causal else torch.ones(len(positions), len(everywhere), dtype=bool)
    return masked(q, k, v, visible, scale)


def masked(q, k, v, visible, scale):
    """out [B, n, H, D] and lse [B, n, H] under a mask [n, m] or [H, n, m]."""
    heads = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, 2).double() for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return out.to(q.dtype), scores.logsumexp(-1).float().transpose(1, 2)


def zigzag(rows, group):
    """Positions of a rank's rows where it holds chunks r and 2P-1-r."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    chunk = torch.arange(rows // 2)
    return torch.cat([chunk + rows // 2 * rank, chunk + rows // 2 * (2 * ranks - 1 - rank)])
