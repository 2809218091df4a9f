"""The timers that dilabench ships, as data. Each says what it proves."""

from dilabench.machine import ACCELERATOR, CPU, CUDA, WORDS
from dilabench.plugins.descriptors import Timer

ON_CUDA = frozenset({CUDA.name})

TIMERS: tuple[Timer, ...] = (
    Timer(
        "wall",
        "host clock around a call and a device synchronisation",
        "dilabench.engine.timers.wall:Wall",
        proves="elapsed host time of one call, device work and launches included",
        devices=WORDS,
        default_on=frozenset({CPU.name, ACCELERATOR}),
    ),
    Timer(
        "cold",
        "CUDA events around a call on an emptied L2, launches hidden behind a spacer",
        "dilabench.engine.timers.cold:Cold",
        proves="GPU time of one call with inputs read from memory, unless the row has the note launch_exposed",
        devices=ON_CUDA,
        default_on=ON_CUDA,
    ),
    Timer(
        "hot",
        "CUDA events around a batch of calls on warm caches",
        "dilabench.engine.timers.hot:Hot",
        proves="mean GPU time of calls in a loop, launches included if the preceding call does not hide them",
        devices=ON_CUDA,
    ),
    Timer(
        "graph",
        "CUDA events around the replay of a CUDA graph on an emptied L2",
        "dilabench.engine.timers.graph:Graph",
        proves="GPU time of one call without launches between its kernels, inputs from memory",
        devices=ON_CUDA,
        for_launch_bound=True,
    ),
    Timer(
        "first_call",
        "import, build and first call in a new process with empty compiler caches",
        "dilabench.engine.timers.first_call:FirstCall",
        proves="what a user waits for before the second call: import, build, compilation, autotuning, first call",
        devices=WORDS,
        fresh_process=True,
    ),
)
