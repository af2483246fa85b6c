"""TensorBoard: event files, and the graph of a model."""
