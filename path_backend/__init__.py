"""PaTH attention: accumulated Householder reflections as a position encoding."""

from path_backend.attention import path_attention

__all__ = ["path_attention"]
