"""Statistics of weights, gradients, activations and the machine, at log points."""
