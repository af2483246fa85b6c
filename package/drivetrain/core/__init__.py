"""Shared modules that know nothing of models: errors, types, checks, names, random streams."""
