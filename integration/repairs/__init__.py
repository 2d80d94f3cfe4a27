"""Repairs of torchtitan 0.2.2 and torch, one file for each upstream fault.

Each file says what goes wrong, where its repair applies, and what to delete when the fault is gone.
The repairs are for every attention, `default` too: without them a model does not run or does not
learn, and an attention would be compared with a broken one.
"""
