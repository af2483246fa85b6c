"""DeepSpeed's ZeRO as a strategy."""
