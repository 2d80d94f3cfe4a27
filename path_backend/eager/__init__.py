"""The operator in plain torch, on any device: a `Backend` (path_backend/arguments.py)."""

from path_backend.eager.attention import attention_backward, attention_forward
from path_backend.eager.segments import (
    cross_segment_backward,
    cross_segment_forward,
    segment_backward,
    segment_ends,
    segment_forward,
)

__all__ = [
    "attention_backward",
    "attention_forward",
    "cross_segment_backward",
    "cross_segment_forward",
    "segment_backward",
    "segment_ends",
    "segment_forward",
]
