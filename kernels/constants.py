"""Numbers that the kernels and the eager form share. Imports neither torch nor triton."""

LOG2_E = 1.4426950408889634
"""log2(e): natural logarithms times this are logarithms to the base 2."""

LN_2 = 0.6931471805599453
"""ln(2), the inverse of LOG2_E."""

CHUNK = 64
"""Tokens per chunk: those of one UT transform."""

GATE_SPAN = 128
"""Tokens per fp64 offset of the gate's running sum; a multiple of every attention tile."""

CLOSED_GATE = -512.0
"""log2 of what a gate keeps at least. fp32 has no such weight, and sums that held the logarithm of
a smaller one would have no digits left for the tokens beside it.
"""
