"""Attention of zigzag or successive chunks by flash-attn 2's low-level functions, called as ring_flash_attn does."""

import torch
import torch.distributed as dist


class Blocks(torch.autograd.Function):
    """Every rank gathers all of k and v, and computes its queries chunk by chunk."""

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal, chunks_of, kernels, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        ctx.plan = rank, size, softmax_scale, causal, chunks_of, kernels, group
        keys, values = gathered(k, size, group), gathered(v, size, group)
        outs, lses = [], []
        for mine, queries in zip(chunks_of(rank, size), parts(q, chunks_of(rank, size)), strict=True):
            out, lse = 0.0, torch.full((q.shape[0], q.shape[2], queries.shape[1]), float("-inf"))
            for other, key, value in every_chunk(keys, values, chunks_of, size):
                if causal and other > mine:
                    continue
                block_out, block_lse, _, _ = kernels[0](
                    **attention(queries, key, value, softmax_scale, causal and other == mine), return_softmax=False
                )
                total = torch.logaddexp(lse, block_lse)
                out = out * weight(lse - total) + block_out.float() * weight(block_lse - total)
                lse = total
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 1).to(q.dtype), torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        rank, size, softmax_scale, causal, chunks_of, kernels, group = ctx.plan
        q, k, v, out, lse = ctx.saved_tensors
        keys, values = gathered(k, size, group), gathered(v, size, group)
        mine = chunks_of(rank, size)
        dq = torch.zeros(q.shape)
        dk, dv = ([torch.zeros(x.shape) for _ in range(size)] for x in (k, v))
        local = zip(*(parts(x, mine) for x in (q, dout, out, dq)), lse.chunk(len(mine), 2), strict=True)
        for own, (queries, given, result, gradient, sums) in zip(mine, local, strict=True):
            gradients = every_chunk(dk, dv, chunks_of, size)
            for (other, key, value), (_, dkey, dvalue) in zip(
                every_chunk(keys, values, chunks_of, size), gradients, strict=True
            ):
                if causal and other > own:
                    continue
                written = [torch.full_like(x, float("nan")) for x in (queries, key, value)]
                kernels[1](
                    **attention(queries, key, value, softmax_scale, causal and other == own),
                    dout=given,
                    out=result,
                    softmax_lse=sums.contiguous(),
                    **dict(zip(("dq", "dk", "dv"), written, strict=True)),
                    deterministic=False,
                    rng_state=None,
                )
                for total, part in zip((gradient, dkey, dvalue), written, strict=True):
                    total += part
        for tensor in (*dk, *dv):
            dist.all_reduce(tensor, group=group)
        return dq.to(q.dtype), dk[rank].to(q.dtype), dv[rank].to(q.dtype), None, None, None, None, None


def attention(q, k, v, softmax_scale, causal):
    """What both low-level functions are given, by the names of flash-attn 2.7."""
    options = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "window_size_left": -1, "window_size_right": -1}
    return {"q": q, "k": k, "v": v, "softmax_scale": softmax_scale, "causal": causal, **options}


def gathered(x, size, group):
    everyone = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(everyone, x.contiguous(), group=group)
    return everyone


def parts(x, chunks):
    return x.chunk(len(chunks), 1)


def every_chunk(keys, values, chunks_of, size):
    for rank in range(size):
        chunks = chunks_of(rank, size)
        yield from zip(chunks, parts(keys[rank], chunks), parts(values[rank], chunks), strict=True)


def weight(exponent):
    return exponent.exp().transpose(1, 2).unsqueeze(-1)
