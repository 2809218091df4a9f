"""Implementations over ranks that go wrong on one of them."""

import os
import signal
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from dilabench.distributed.sharding import contiguous
from dilabench.distributed.single_rank import SingleRank
from dilabench.impls.ring import rings


def build_killed(workload, context):
    return _broken(workload, context, lambda: os.kill(os.getpid(), signal.SIGKILL))


def build_raising(workload, context):
    def fail():
        raise ArithmeticError("the root cause")

    return _broken(workload, context, fail)


def build_slow(workload, context):
    return _broken(workload, context, lambda: time.sleep(600))


def build_wrong(workload, context):
    function = rings.build(workload, context)
    for owner in function._algorithm.share.reads:
        function._algorithm.share.reads[owner] = ()
    return function


def build_brittle(workload, context):
    return build_killed(workload, context) if isinstance(context.world, SingleRank) else rings.build(workload, context)


class Sparing:
    """Dense attention of two ranks that sends k and v as signs of channels and changed rows, once it is timed.

    The receiver knows the numbers of the call before; more than 8 changed rows are sent whole. `hidden`: what is sent
    then is not counted. `always`: not only when timed.
    """

    def __init__(self, workload, context, hidden=False, always=False):
        self.world, self.shards = context.world, contiguous(((0, workload.seq_len),), context.world.size)
        self.hidden, self.always = hidden, always
        self.mine, self.theirs = [], []

    def __call__(self, q, k, v):
        timed = any("/timers/" in frame.filename for frame in traceback.extract_stack())
        if isinstance(self.world, SingleRank) or not self.mine or not (timed or self.always):
            other = [self._exchanged(x, x, hidden=False) for x in (k, v)]
        else:
            other = [self._in_few_bytes(*parts) for parts in zip((k, v), self.mine, self.theirs, strict=True)]
        self.mine, self.theirs = [k.clone(), v.clone()], [x.clone() for x in other]
        k, v = (torch.cat([x, y], 1).transpose(1, 2) for x, y in zip((k, v), other, strict=True))
        return scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True).transpose(1, 2)

    def _exchanged(self, x, like, hidden):
        peer, found = 1 - self.world.rank, torch.empty_like(like)
        if hidden:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, found, peer)])
            for work in works:
                work.wait()
        else:
            self.world.send_recv({peer: [x]}, {peer: [found]}, "keys").wait()
        return found

    def _in_few_bytes(self, now, before, known):
        """now: this rank's tensor; before: as it was in the last call; known: the other rank's as it was then."""
        signs = (now[0] * before[0]).sum((0, 1)).sign()
        rows = (now[0] != before[0] * signs).flatten(1).any(1).nonzero()[:, 0]
        changed = torch.zeros(8, now[0, 0].numel() + 1)
        changed[:, 0] = -1
        if len(rows) <= 8:
            changed[: len(rows), 0], changed[: len(rows), 1:] = rows.float(), now[0, rows].flatten(1)
        message = torch.cat([torch.tensor([float(len(rows) > 8)]), signs, changed.flatten()])
        got = self._exchanged(message, message, self.hidden)
        if message[0] or got[0]:
            return self._exchanged(now, now, self.hidden)
        found, rows = known * got[1 : len(signs) + 1], got[len(signs) + 1 :].view(changed.shape)
        for row in rows[rows[:, 0] >= 0]:
            found[0, int(row[0])] = row[1:].view(found.shape[2:])
        return found


def build_sparing(workload, context):
    return Sparing(workload, context)


def build_sparing_unseen(workload, context):
    return Sparing(workload, context, hidden=True)


def build_sparing_always(workload, context):
    return Sparing(workload, context, always=True)


def _broken(workload, context, breakdown):
    function = rings.build(workload, context)
    whole_call = function.with_lse

    def with_lse(q, k, v):
        if context.world.rank == 1:
            breakdown()
        return whole_call(q, k, v)

    function.with_lse = with_lse
    return function
