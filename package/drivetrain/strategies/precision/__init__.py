"""Precisions: the value, the registry of names, and the precisions that need code."""
