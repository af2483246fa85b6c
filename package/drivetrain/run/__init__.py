"""One fit or evaluation in progress: its state, its loops, its end."""
