"""Hugging Face's accelerate as a strategy."""
