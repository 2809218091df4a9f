"""The same check as in the other tests, in a process that torchrun has started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ring_cases

from dilabench.distributed.launch import world_from_environment

FEW = ("causal", "window", "branches")


def say(line):
    # In one write: torchrun leaves output unbuffered, where print ends its line with a second one, too late.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main():
    with world_from_environment(timeout_s=40) as world:
        cases = {case: ring_cases.PADDED[case] for case in FEW}
        wrong = ring_cases.exact(world, ["zigzag-ring", "ring-allgather"], cases)
    say(f"rank {world.rank} of {world.size}: {wrong}")
    return 5 if wrong else 0


sys.exit(main())
