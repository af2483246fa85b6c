"""Scripts for transformers' Trainer: its classes, and what they need."""
