"""PaTH attention: accumulated Householder reflections as a position encoding."""
