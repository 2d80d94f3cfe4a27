"""The algorithm in plain torch, on any device."""
