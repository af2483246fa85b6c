"""Processes: start them, connect them, watch them, and end them together."""
