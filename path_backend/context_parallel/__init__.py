"""Attention on sequences whose tokens lie on several ranks."""
