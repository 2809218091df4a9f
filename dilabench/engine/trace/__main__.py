"""The process that traces: a question per line on standard input, the answer on what was standard output."""

import gc
import json
import os
import resource
import signal
import sys
from typing import Any

import psutil

from dilabench.engine.call.specs import CaseSpec
from dilabench.engine.trace.lengths import traced
from dilabench.errors import first_line
from dilabench.plugins.boundary import place

# Tables of positions are really made: of what is free they may take this part.
SHARE_OF_MEMORY = 0.5


def main() -> None:
    """Answer until standard input ends. The output of the traced code is discarded."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    least = psutil.Process().memory_info().vms + int(SHARE_OF_MEMORY * psutil.virtual_memory().available)
    resource.setrlimit(resource.RLIMIT_DATA, (least if hard_limit < 0 else min(hard_limit, least), hard_limit))
    modules = 0
    for line in sys.stdin:
        if len(sys.modules) > modules:
            # Modules are never garbage: collections then look at what traces have made.
            gc.collect()
            gc.freeze()
            modules = len(sys.modules)
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        return traced(CaseSpec.model_validate(question["spec"]), question["device"]).model_dump()
    # A third party's code may raise anything, even to end the process.
    except BaseException as error:  # noqa: BLE001
        return {"why": f"{type(error).__name__}: {first_line(error)}"[:500] + place(error, also_ours=False)}


if __name__ == "__main__":
    main()
