"""Checkpoints on storage: written, verified, kept, locked, recovered."""
