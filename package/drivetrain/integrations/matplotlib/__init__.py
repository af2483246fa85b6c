"""matplotlib: figures of metrics."""
