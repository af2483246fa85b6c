"""One step: the micro-batches of a window in, new weights out."""
