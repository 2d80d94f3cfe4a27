"""PaTH attention: accumulated Householder reflections as a position encoding."""

from path_backend.attention import path_attention
from path_backend.beta import beta_from_logits

__all__ = ["beta_from_logits", "path_attention"]
