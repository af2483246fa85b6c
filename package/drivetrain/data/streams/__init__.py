"""Streams made of other streams: batches of their samples, without bad ones, or in another order."""
