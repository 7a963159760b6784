"""Triton's interpreter with half of its work."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """Makes this process's interpreter faster.

    It watches sums of integers for overflow, as compiled code does not: nothing here comes near one. It looks up the
    same few dtypes, and makes the same few types and shapes for each intermediate result, so all of them are kept. It
    finds the common dtype and shape of operands that have them already. And at each call of a function by a kernel it
    makes the language its own: once for each module does as well.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_dtypes(interpreter)
    _keep_types(interpreter.tl.core)
    _pass_like_operands(interpreter.TritonSemantic)
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


def _keep_types(language: Any) -> None:
    """Types of blocks, and the constants that tensors of these types have for shapes and sizes."""
    make, types, shapes = language.block_type.__init__, {}, {}

    def constants(sizes: Sequence[int]) -> tuple[Any, Any]:
        wrapped = [language.constexpr(size) for size in sizes]
        return language.tuple(wrapped), language.constexpr(math.prod(sizes))

    no_shape = constants([])

    def initialize_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make(self, element_ty, shape)
            sizes = key[1:]
            self.shape, self.constants = shapes.setdefault(sizes, (self.shape, constants(sizes)))
            types[key] = self.__dict__.copy()
        self.__dict__.update(types[key])
        self.element_ty = element_ty

    def initialize(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.constants if type.is_block() else no_shape

    language.block_type.__init__, language.tensor.__init__ = initialize_type, initialize


def _pass_like_operands(semantic: Any) -> None:
    """Two operands of one dtype need no cast, and two of one shape no broadcast."""
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def checked(self: Any, lhs: Any, rhs: Any, *how: Any, **more: Any) -> Any:
        dtype, other = getattr(lhs, "dtype", None), getattr(rhs, "dtype", None)  # numbers have none
        division = len(how) > 3 or more
        if dtype is None or dtype is not other or dtype.is_ptr() or division:
            return check(self, lhs, rhs, *how, **more)
        return self.broadcast_impl_value(lhs, rhs)

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        shape, other = getattr(lhs.type, "shape", None), getattr(rhs.type, "shape", None)
        if shape is other:  # equal shapes are one object, and numbers have none
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, broadcast_unlike
