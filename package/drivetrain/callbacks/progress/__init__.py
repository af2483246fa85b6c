"""The progress of a run: bars, lines and tables."""
