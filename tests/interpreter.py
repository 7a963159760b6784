"""Triton's interpreter with half of its work."""

from dataclasses import replace
from typing import Any


def quicken() -> None:
    """Of this process.

    It watches sums of integers for overflow, as compiled code does not: nothing here comes near one. And at
    each call of a function by a kernel it makes the language its own: once for each module does as well.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
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
