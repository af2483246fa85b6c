"""One update: the micro-batches of a window in, the optimizers' steps made."""
