"""A fit found without training: its length, rates, intervals, memory and conflicts."""
