"""Conversion of a checkpoint to a store of our own: streamed, resumable, the same bytes however often stopped."""

from deltafin.convert.pipeline import EXTRAS, Conversion, convert

__all__ = ["EXTRAS", "Conversion", "convert"]
