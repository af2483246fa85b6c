"""Weights by name: from a module and into one, and in files of their own."""
