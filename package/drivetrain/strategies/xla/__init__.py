"""torch_xla's strategies: one device, and two ways to shard over several."""
