"""Time, memory and accuracy of the kernels beside their peers."""
