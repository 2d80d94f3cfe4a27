"""Constants of the algorithm that its two forms share. No torch, no Triton."""

CHUNK = 64
"""Tokens per UT transform."""
