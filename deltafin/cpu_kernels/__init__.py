"""Rows of the operation table for CPUs, in Numba. No row is replaced yet: every operation is the torch reference."""

from dataclasses import replace

from deltafin.ops import REFERENCE

OPS = replace(REFERENCE, name="numba")
