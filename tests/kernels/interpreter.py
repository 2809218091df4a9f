"""Runs a script, whose path comes first, in Triton's interpreter on the CPU: `interpreted` in tests/conftest.py.

It multiplies tiles of bfloat16 as the 16-bit integers that it keeps them as; here they are numbers. Memory that the
script leaves uninitialised is full of NaN.

What is left out takes two thirds of the interpreter's time and changes no result: sums and products of 32-bit
integers are not repeated in 64 bits to see whether they overflow, Triton's language, which a launch replaces by the
interpreter's, is not replaced again at every call of a function in a kernel, and what follows from a shape or a dtype
is not made again for every tensor.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
from functools import cache
from math import prod
from pathlib import Path

# Read when a kernel is decorated.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from triton.language import core
from triton.runtime import interpreter

from dilabench.engine.verify import poisoned


def call(function: interpreter.InterpretedFunction, *arguments: object, **named: object) -> object:
    # Of each module once: it may name the language otherwise than the kernel's module.
    names = function.fn.__globals__
    if id(names) not in replaced:
        interpreter._patch_lang(function.fn)
        replaced.add(id(names))
    return function.rewrite()(*arguments, **named)


@cache
def in_constants(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """A shape as kernels read it, and the number of elements."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape))


def tensor(self: core.tensor, handle: object, of: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, of, of.scalar
    self.shape, self.numel = in_constants(of.shape if of.is_block() else ())


def numpy_dtype(of: core.dtype) -> np.dtype:
    name = of.scalar.name
    if name not in numpy_dtypes:
        numpy_dtypes[name] = made_anew(of)
    return numpy_dtypes[name]


def dot(self: interpreter.InterpreterBuilder, a: object, b: object, *more: object) -> object:
    return multiply(self, in_float32(a), in_float32(b), *more)


def in_float32(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
    if x.dtype.scalar.name != "bf16":
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), core.float32)


if __name__ == "__main__":
    multiply = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = dot
    replaced: set[int] = set()
    numpy_dtypes: dict[str, np.dtype] = {}
    made_anew = interpreter._get_np_dtype
    interpreter.InterpretedFunction.__call__ = call
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpy_dtype
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    sys.path[0] = str(Path(sys.argv[1]).parent)
    with poisoned():
        runpy.run_path(sys.argv[1], run_name="__main__")
