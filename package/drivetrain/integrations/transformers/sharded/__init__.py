"""Models that fit into no process: read in rows, and split by their plans."""
