"""Triton's interpreter in half the time: what it finds out at every operation is kept.

Its operations take NumPy less time than it takes to find their types, shapes and constants, which
are the same for every program of every launch. Nothing here computes: values, types and errors are
those of Triton's own functions, which are called for what is not known yet.
"""

import functools
import inspect
import operator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

LARGEST = 1024
"""Elements of a constant that is kept."""


def install():
    """Patch this process's interpreter."""
    _keep_parameters()
    _launch_where_tensors_are()
    _keep_types()
    _keep_shapes()
    _keep_operands()
    _look_for_overflows()
    _patch_the_language_for_good()


def arguments(kernel, given, named):
    """What a kernel's parameters are given, by name; options of its launch alone are left out."""
    names, defaults = _parameters(kernel)
    named = {name: value for name, value in named.items() if name in names}
    found = defaults | dict(zip(names, given, strict=False)) | named
    twice = len(given) > len(names) or not named.keys().isdisjoint(names[: len(given)])
    if twice or len(found) < len(names):
        return inspect.getcallargs(kernel, *given, **named)  # which says what is wrong
    return found


@functools.cache
def _parameters(kernel):
    """The names of a kernel's parameters, and their defaults."""
    parameters = inspect.signature(kernel).parameters
    given = {name: one.default for name, one in parameters.items() if one.default is not one.empty}
    return tuple(parameters), given


def _keep_parameters():
    """Which of a kernel's parameters are constants, and types by their names."""
    make, kept = interpreter.GridExecutor.__init__, {}

    def init(self, fn, arg_names, grid, pre_run_hooks):
        if fn not in kept:
            make(self, fn, arg_names, grid, pre_run_hooks)
            kept[fn] = vars(self)
        vars(self).update(kept[fn], grid=grid, pre_run_hooks=pre_run_hooks)

    interpreter.GridExecutor.__init__ = init
    tl.str_to_ty = functools.cache(tl.str_to_ty)


def _launch_where_tensors_are():
    """Tensors in this memory are not copied for a launch, and back."""
    run = interpreter.GridExecutor.__call__

    def call(self, *given, **named):
        values = arguments(self.fn, given, named)
        if self.pre_run_hooks or not all(map(_is_here, values.values())):
            run(self, *given, **named)
            return
        scope, constants = interpreter._patch_lang(self.fn), self.constexprs
        try:
            for name, value in values.items():
                if name not in constants:
                    values[name] = interpreter._implicit_cvt(value)
            grid = self.grid(values) if callable(self.grid) else self.grid
            grid = (*grid, *(1,) * (3 - len(grid)))
            interpreter.interpreter_builder.set_grid_dim(*grid)
            try:
                for index in np.ndindex(grid):
                    interpreter.interpreter_builder.set_grid_idx(*index)
                    self.fn(**values)
            except Exception as error:
                raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()

    interpreter.GridExecutor.__call__ = call


def _is_here(value):
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    return not hasattr(value, "data_ptr") and not isinstance(value, tuple)


def _keep_types():
    """Types by their names; most of those that are compared are one object."""
    of_numpy = interpreter._get_np_dtype
    kept: dict[str, Any] = {}

    def get_np_dtype(dtype):
        if (found := kept.get(dtype.name)) is None:
            found = kept[dtype.name] = of_numpy(dtype)
        return found

    interpreter._get_np_dtype = get_np_dtype
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: self.name in integers
    for kind in (core.dtype, core.pointer_type, core.block_type):
        kind.__eq__ = _comparison(kind.__eq__)


def _comparison(compare):
    return lambda one, other: one is other or compare(one, other)


def _keep_shapes():
    """A shape is one object; so is what a tensor has of it."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    unwrap, plain = core._unwrap_if_constexpr, {int, float, bool, str, core.tensor}
    blocks: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}
    tensors: dict[str, Any] = {}

    def unwrapped(value):
        return value if type(value) in plain else unwrap(value)

    def block_init(self, element_ty, shape):
        key = (element_ty.name, *map(unwrapped, shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor_init(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[type.name]

    core._unwrap_if_constexpr = unwrapped
    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init


def _keep_operands():
    """Operands of one type and shape stay as they are; integers are converted once, also to the
    shape of the tensor beside them."""
    check = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    convert = TritonSemantic._cast_to_computation_type
    compute = TritonSemantic.computation_type_impl
    numbers, types = {}, {}
    beside: dict[Any, Any] = {}

    def check_types(self, lhs, rhs, *options, **named):
        if type(rhs) is int and type(lhs) is tl.tensor:
            key = lhs.type.name, rhs, options, *named.items()
            if key in beside:
                return lhs, beside[key]
            left, right = check(self, lhs, rhs, *options, **named)
            if left is lhs and right.handle.data.size <= LARGEST:
                beside[key] = right
            return left, right
        alike = type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype
        divides = len(options) > 3 or "div_or_mod" in named
        if alike and not divides and not lhs.dtype.is_ptr():
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *options, **named)

    def broadcast_values(self, lhs, rhs):
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block():
            same = one.shape is other.shape
        else:
            same = not one.is_block() and not other.is_block()
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    def cast(self, value, dtype):
        if type(value) is not int:
            return convert(self, value, dtype)
        if (value, dtype.name) not in numbers:
            numbers[value, dtype.name] = convert(self, value, dtype)
        return numbers[value, dtype.name]

    def computation_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in types:
            types[key] = compute(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return types[key]

    TritonSemantic.binary_op_type_checking_impl = check_types
    TritonSemantic.broadcast_impl_value = broadcast_values
    TritonSemantic._cast_to_computation_type = cast
    TritonSemantic.computation_type_impl = computation_type


def _look_for_overflows():
    """Whether sums and products of whole numbers fit: Triton looks, too, and says nothing of what
    it finds unless kernels are compiled to be debugged."""
    operations = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
    limits: dict[str, Any] = {}

    def sanitize(self, lhs, rhs, binary_op):
        kind, compute = lhs.dtype, operations[binary_op.__name__]
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        if kind.name not in limits:
            limits[kind.name] = kind.get_int_min_value(), kind.get_int_max_value()
        least, most = limits[kind.name]
        one, other = lhs.handle.data, rhs.handle.data
        if one.size == other.size == 1:
            fits = least <= compute(int(one.item()), int(other.item())) <= most
        else:
            wide = compute(one.astype(np.int64), other.astype(np.int64))
            fits = least <= wide.min() and wide.max() <= most
        if not fits:
            raise OverflowError(f"{kind.name} overflows in {binary_op.__name__}")

    TritonSemantic.binary_op_sanitize_overflow_impl = sanitize


def _patch_the_language_for_good():
    """Patch Triton's language once, not again for each launch and each function that it calls.

    The interpreter looks through all of the language each time, and nothing but kernels uses it
    here. What stands in for a builtin need not ask whether it was called from a kernel.
    """
    patch, guard = interpreter._patch_lang, core.add.__code__
    patched: set[int] = set()

    def patch_attr(obj, name, member, builder, scope):
        inner = member.__wrapped__ if getattr(member, "__code__", None) is guard else member

        def called(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, called)

    @functools.cache
    def languages(fn):
        return {id(value) for value in fn.__globals__.values() if value is tl or value is core}

    def patch_lang(fn):
        if not patched >= languages(fn):
            patch(fn)
            patched.update(languages(fn))
        return interpreter._LangPatchScope()

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch_lang
