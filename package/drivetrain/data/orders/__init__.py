"""The order in which the samples of a dataset are read: as it is, shuffled, grouped by length, or mixed."""
