"""The content of a checkpoint: safetensors files, strict JSON, and the manifest that describes them."""
