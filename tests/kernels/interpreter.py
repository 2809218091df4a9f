"""Runs a script, whose path is the argument, in Triton's interpreter on the CPU: `interpreted` in tests/conftest.py.

Two things are left out that take half of the interpreter's time and change no result: sums and products of 32-bit
integers are not repeated in 64 bits to see whether they overflow, and Triton's language, which a launch replaces by the
interpreter's, is not replaced again at every call of a function in a kernel.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
from pathlib import Path

# Read when a kernel is decorated.
os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter


def call(function: interpreter.InterpretedFunction, *arguments: object, **named: object) -> object:
    # Of each module once: it may name the language otherwise than the kernel's module.
    names = function.fn.__globals__
    if id(names) not in replaced:
        interpreter._patch_lang(function.fn)
        replaced.add(id(names))
    return function.rewrite()(*arguments, **named)


if __name__ == "__main__":
    replaced: set[int] = set()
    interpreter.InterpretedFunction.__call__ = call
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    sys.path[0] = str(Path(sys.argv[1]).parent)
    runpy.run_path(sys.argv[1], run_name="__main__")
