"""Processes: what watches them, and, in later versions, what connects them."""
