"""Triton's interpreter for tests on a machine without a GPU; to be imported before any kernel."""

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

if DEVICE == "cpu":
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    builder, convert, patch = interpreter.InterpreterBuilder, interpreter._convert_float, interpreter._patch_lang_tensor
    create_dot = builder.create_dot

    def rounded(x, source, target, mode):
        """Round to the nearest bfloat16 as a GPU does; the interpreter cuts off."""
        if (source, target) == (float32, bfloat16):
            return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy()
        return convert(x, source, target, mode)

    def dot_of_halves(self, a, b, *others):
        """Multiply what bfloat16 stands for; the interpreter would multiply the bits."""
        wide = (self.cast_impl(x, float32) if x.dtype.scalar == bfloat16 else x for x in (a, b))
        return create_dot(self, *wide, *others)

    def with_bounds(tensor, scope):
        """Let a number that was loaded be the bound of a loop: NumPy 2.4 makes no integer of an array of one."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float, interpreter._patch_lang_tensor = rounded, with_bounds
    builder.create_dot = dot_of_halves

    held: list[tuple[int, int]] = []
    begin = interpreter.GridExecutor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store

    def with_memory(self, args, kwargs):
        """Note what memory a launch was given."""
        found = begin(self, args, kwargs)
        every = [a for a in (*found[0], *found[1].values()) for a in (a if isinstance(a, tuple) else (a,))]
        storages = [a.untyped_storage() for a in every if isinstance(a, torch.Tensor)]
        held[:] = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        return found

    def check(pointers, mask, size):
        """A pointer into memory of somebody else is a fault on a GPU, sooner or later."""
        used = pointers.data[mask.data.astype(bool)].astype(np.int64)
        inside = np.zeros(used.shape, bool)
        for start, stop in held:
            inside |= (used >= start) & (used + size <= stop)
        assert inside.all(), "a kernel touched memory that it was not given"

    def checked_load(self, pointers, mask, *others):
        check(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *others)

    def checked_store(self, pointers, value, mask, *others):
        check(pointers, mask, pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *others)

    interpreter.GridExecutor._init_args_hst = with_memory
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
