"""torch's fully sharded data parallelism as a strategy."""
