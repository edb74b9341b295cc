"""Rows of the operation table for GPUs, in Triton. No row is replaced yet: every operation is the torch reference."""

from dataclasses import replace

from deltafin.ops import REFERENCE

OPS = replace(REFERENCE, name="triton")
