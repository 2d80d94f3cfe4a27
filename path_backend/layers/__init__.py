"""Attention layers for host models, around the operator."""
