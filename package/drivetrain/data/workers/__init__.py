"""The worker processes of a dataset, and how they end."""
