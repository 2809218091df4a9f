"""Run by a test: every kernel by the name that Triton has for it in its cache, settled in the order of a seed."""

import importlib
import json
import pkgutil
import random
import sys

from triton.runtime import JITFunction

import dilabench.kernels
from dilabench.kernels.launch_cache import settle_key

modules = [found.name for found in pkgutil.walk_packages(dilabench.kernels.__path__, "dilabench.kernels.")]
drawn = random.Random(sys.argv[1])
drawn.shuffle(modules)
functions = {
    f"{module}.{name}": function
    for module in modules
    for name, function in vars(importlib.import_module(module)).items()
    if isinstance(function, JITFunction) and function.fn.__module__ == module
}
order = [*functions]
drawn.shuffle(order)
for name in order:
    settle_key(functions[name])
json.dump({name: functions[name].cache_key for name in sorted(order)}, sys.stdout)
