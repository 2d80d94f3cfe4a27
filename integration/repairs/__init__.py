"""Repairs of torchtitan 0.2.2, one file for each upstream fault."""
