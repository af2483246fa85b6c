"""torch_xla's strategies: one device, and shards over all devices of a process."""
