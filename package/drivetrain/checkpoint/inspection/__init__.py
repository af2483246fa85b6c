"""Checkpoints for people: list them, describe one, compare two. Nothing on the disk changes."""
