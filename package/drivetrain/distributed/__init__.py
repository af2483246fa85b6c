"""Processes: what starts them, connects them, watches them, and ends them together."""
