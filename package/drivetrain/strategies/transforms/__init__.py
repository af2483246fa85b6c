"""Changes to a module before it is wrapped: compilation, recomputation, offloading."""
