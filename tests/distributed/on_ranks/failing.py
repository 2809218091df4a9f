"""Implementations over ranks that go wrong on one of them."""

import os
import signal
import time

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


def _broken(workload, context, breakdown):
    function = rings.build(workload, context)
    whole_call = function.with_lse

    def with_lse(q, k, v):
        if context.world.rank == 1:
            breakdown()
        return whole_call(q, k, v)

    function.with_lse = with_lse
    return function
