"""Wrappers of torchtitan 0.2.2 that make its models train with the attention of a job."""
