"""Takes its time to be imported, built and called once. `FirstCall` must see all three."""

import time

import torch

time.sleep(0.05)


def build(workload, context):
    time.sleep(0.03)
    called = []

    def attention(q, k, v):
        if not called:
            called.append(True)
            time.sleep(0.02)
        return torch.zeros_like(q)

    return attention
