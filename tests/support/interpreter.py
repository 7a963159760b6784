"""Triton's interpreter with half of its work."""

import functools
import math
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """Makes this process's interpreter faster.

    It watches sums of integers for overflow, as compiled code does not: nothing here comes near one. It looks up the
    same few dtypes and wraps the same few shapes for each intermediate result, so both are kept. And at each call of a
    function by a kernel it makes the language its own: once for each module does as well.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_dtypes(interpreter)
    _keep_shapes(interpreter.tl.core)
    function, launch = interpreter.InterpretedFunction, interpreter.GridExecutor.__call__
    if "_patch_lang" not in function.__call__.__code__.co_names:  # a version that does not do so
        return
    patched: set[int] = set()

    def call(self: Any, *args: Any, **more: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **more)

    def start(self: Any, *args: Any, **more: Any) -> Any:  # before and after it the language is as it was
        patched.clear()
        return launch(self, *args, **more)

    function.__call__, interpreter.GridExecutor.__call__ = call, start


def _keep_dtypes(interpreter: Any) -> None:
    look_up, known = interpreter._get_np_dtype, {}

    def get(dtype: Any) -> Any:  # that of a block is that of its elements
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype.scalar)
        return known[name]

    interpreter._get_np_dtype = get


def _keep_shapes(language: Any) -> None:
    @functools.cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return language.tuple([language.constexpr(size) for size in shape]), language.constexpr(
            math.prod(shape)
        )

    def initialize(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(tuple(type.shape) if type.is_block() else ())

    language.tensor.__init__ = initialize
