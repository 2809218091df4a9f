"""Runs scripts in Triton's interpreter on the CPU, for `interpreted` in tests/conftest.py: each in a fork of this
process, which has loaded torch and Triton. A line of standard input is a list in JSON: the file for all output, the
script, its arguments. The exit status of each is printed.

The interpreter multiplies tiles of bfloat16 as the 16-bit integers that it keeps them as; here they are numbers.
Memory that the script leaves uninitialised is full of NaN.

What is left out takes most of the interpreter's time and changes no result: sums and products of 32-bit integers are
not repeated in 64 bits to see whether they overflow, Triton's language, which a launch replaces by the interpreter's,
is not replaced again at every call of a function in a kernel, and types are made once for each shape and dtype, so that
operands of one type are known not to need conversion: numpy adds, multiplies and compares them at once.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Container, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NoReturn

# Read when a kernel is decorated.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter

from dilabench.engine.verify import poisoned


def call(function: interpreter.InterpretedFunction, *arguments: object, **named: object) -> object:
    # Of each module once: it may name the language otherwise than the kernel's module.
    names = function.fn.__globals__
    if id(names) not in replaced:
        interpreter._patch_lang(function.fn)
        replaced.add(id(names))
    return function.rewrite()(*arguments, **named)


class Block(core.block_type):
    """One object for each shape and element type."""

    made: ClassVar[dict[tuple[str, tuple[int, ...]], Block]] = {}

    def __new__(cls, element_ty: core.dtype, shape: Sequence[int | core.constexpr]) -> Block:
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        key = element_ty.name, sizes
        if key not in cls.made:
            made = super().__new__(cls)
            super(Block, made).__init__(element_ty, list(sizes))
            made.in_constants = in_constants(sizes)
            cls.made[key] = made
        return cls.made[key]

    def __init__(self, element_ty: core.dtype, shape: object) -> None:
        """`__new__` has made it."""

    def with_element_ty(self, scalar_ty: core.dtype) -> Block:
        return Block(scalar_ty, self.shape.values)

    def to_ir(self, builder: object) -> Block:
        return self


@cache
def in_constants(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """A shape as kernels read it, and the number of elements."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape))


def tensor(self: core.tensor, handle: object, of: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, of, of.scalar
    self.shape, self.numel = of.in_constants if type(of) is Block else in_constants(())


def equal(self: core.tuple, other: object) -> bool:
    """Elements are compared one by one, constants or numbers."""
    values = other.values if type(other) is core.tuple else other
    return self.values == (list(values) if isinstance(values, tuple) else values)


# Dtypes that numpy has, and the numbers that do not change them; how large these may be.
NUMBERS = {"int32": (int,), "int64": (int,), "fp16": (int, float), "fp32": (int, float), "fp64": (int, float)}
LARGEST = 2**15
INTEGERS = {"int32", "int64"}


def constant(number: float, like: core.tensor) -> core.tensor:
    """A number in the type of a tensor."""
    data = np.full(like.handle.data.shape, number, numpy_dtype(like.dtype))
    return core.tensor(interpreter.TensorHandle(data, like.dtype), like.type)


def of_one_shape(self: object, lhs: core.tensor, rhs: core.tensor) -> Any:
    return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)


def operands(
    self: object,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Both operands in the type and shape of the result."""
    if not div_or_mod and type(lhs) is core.tensor and lhs.dtype.name in NUMBERS:
        if type(rhs) is core.tensor:
            if lhs.type is rhs.type:
                return lhs, rhs
        elif arithmetic_check and type(rhs) in NUMBERS[lhs.dtype.name] and -LARGEST < rhs < LARGEST:
            return lhs, constant(rhs, lhs)
    return converted(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def unwrapped(x: Any) -> Any:
    """A constant's value; anything else as it is."""
    kind = type(x)
    return x.value if kind is core.constexpr else x if kind in PLAIN else unwrapped_anything(x)


def same(self: core.dtype, other: object) -> bool:
    return self is other or same_name(self, other)


def reduced(self: interpreter.ReduceOps, given: Any) -> Any:
    """Also of `xor`, which sorting takes, in one call of numpy."""
    if self.combine_fn is not language.standard._xor_combine:
        return apply(self, given)
    data = np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(data, given[0].dtype)


def in_place_of(owner: object, name: str, member: Any, builder: object, scope: Any) -> None:
    """A function of Triton's language that the interpreter's builder serves."""
    inner, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def function(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return inner(*arguments, **named)

    scope.set_attr(owner, name, operator_of(name, function) if owner is core.tensor else function)


def operator_of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of tensors that numpy does at once where both operands have one dtype; ``function`` does the rest."""
    if name not in OPERATIONS:
        return function
    operation, dtypes, compares = OPERATIONS[name]

    def of_numbers(self: core.tensor, other: Any) -> Any:
        dtype = self.dtype
        if dtype.name in dtypes:
            right, of = operand(other, self)
            if right is not None:
                data = operation(self.handle.data, right)
                of = of or Block(dtype, data.shape)
                if compares:
                    of = of.with_element_ty(core.int1) if type(of) is Block else core.int1
                return core.tensor(interpreter.TensorHandle(data, dtype), of)
        elif name == "__add__" and type(dtype) is core.pointer_type and is_of_integers(other):
            return moved(self, other)
        return function(self, other)

    return of_numbers


def operand(value: Any, like: core.tensor) -> tuple[Any, core.dtype | None]:
    """What numpy takes and the type of a result beside ``like``: None for that which follows from its shape."""
    if type(value) is core.tensor:
        if value.type is like.type:
            return value.handle.data, like.type
        if value.dtype.name != like.dtype.name:
            return None, None
        one, two = (type(x.type) is Block for x in (like, value))
        return value.handle.data, None if one and two else like.type if one else value.type
    if type(value) is core.constexpr:
        value = value.value
    if type(value) in NUMBERS.get(like.dtype.name, ()) and -LARGEST < value < LARGEST:
        return numpy_dtype(like.dtype).type(value), like.type
    return None, None


def is_of_integers(value: Any) -> bool:
    return type(value) is core.tensor and value.dtype.name in INTEGERS


def moved(pointer: core.tensor, offset: core.tensor) -> core.tensor:
    """Pointers and what is added to them."""
    size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    data = pointer.handle.data + size * offset.handle.data.astype(np.uint64)
    of = Block(pointer.dtype, data.shape) if type(offset.type) is Block else pointer.type
    return core.tensor(interpreter.TensorHandle(data, pointer.handle.dtype), of)


def quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero."""
    return (a - np.fmod(a, b)) // b


def tensor_of(self: semantic.TritonSemantic, x: Any, check_type: bool = True) -> Any:
    return x if type(x) is core.tensor else converted_to_tensor(self, x, check_type)


def handle(self: interpreter.TensorHandle, data: np.ndarray, dtype: core.dtype, attr: Any = None) -> None:
    """Nothing is looked at."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


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


def run_here(output: Path, script: list[str]) -> NoReturn:
    """Run a script with its arguments as this process's program, and exit."""
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv, sys.path[0] = [__file__, *script], str(Path(script[0]).parent)
    status = 1
    try:
        with poisoned():
            runpy.run_path(script[0], run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001 - printed, whatever it is
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# How numpy does it, for which dtypes, and whether the result is a truth.
OPERATIONS: dict[str, tuple[Callable[..., Any], Container[str], bool]] = {
    **{f"__{name}__": (getattr(operator, name), NUMBERS, False) for name in ("add", "sub", "mul")},
    **{f"__{name}__": (getattr(operator, name), NUMBERS, True) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{f"__{name}_": (getattr(operator, name), {"int1"}, False) for name in ("and_", "or_")},
    "__radd__": (operator.add, NUMBERS, False),
    "__rmul__": (operator.mul, NUMBERS, False),
    "__rsub__": (lambda a, b: b - a, NUMBERS, False),
    "__floordiv__": (quotient, INTEGERS, False),
    "__mod__": (np.fmod, INTEGERS, False),
}
multiply = interpreter.InterpreterBuilder.create_dot
replaced: set[int] = set()
numpy_dtypes: dict[str, np.dtype] = {}
made_anew = interpreter._get_np_dtype
same_name = core.dtype.__eq__
unwrapped_anything = core._unwrap_if_constexpr
PLAIN = {core.tensor, core.dtype, int, float, bool, str, type(None)}
converted = semantic.TritonSemantic.binary_op_type_checking_impl
converted_to_tensor = semantic.TritonSemantic.to_tensor
broadcast = semantic.TritonSemantic.broadcast_impl_value
apply = interpreter.ReduceOps.apply_impl


def set_up() -> None:
    """Replace what is slow or wrong in the interpreter of this process."""
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpretedFunction.__call__ = call
    interpreter.TensorHandle.__init__ = handle
    core.tensor.__init__ = tensor
    core.block_type = language.block_type = Block
    core.tuple.__eq__ = equal
    core.dtype.__eq__ = same
    core._unwrap_if_constexpr = unwrapped
    semantic.TritonSemantic.binary_op_type_checking_impl = operands
    semantic.TritonSemantic.broadcast_impl_value = of_one_shape
    semantic.TritonSemantic.to_tensor = tensor_of
    interpreter.ReduceOps.apply_impl = reduced
    interpreter._patch_attr = in_place_of
    interpreter._get_np_dtype = numpy_dtype
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


if __name__ == "__main__":
    set_up()
    for line in sys.stdin:
        output, *script = json.loads(line)
        child = os.fork()
        if not child:
            run_here(Path(output), script)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201 - the process that tests run in reads it
