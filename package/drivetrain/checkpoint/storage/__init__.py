"""The few file operations that checkpoints need: on a local disk, and on object stores."""
