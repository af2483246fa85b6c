"""From arguments to a run, and the verbs."""
