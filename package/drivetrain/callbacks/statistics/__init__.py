"""Figures of weights, gradients, activations, speed and the machine, at log points."""
