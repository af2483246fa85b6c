"""The failure channel: when one rank fails or hangs, all end within seconds, and the last lines say why."""
