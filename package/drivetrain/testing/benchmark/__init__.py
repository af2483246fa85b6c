"""A benchmark of a task: the time and memory of its steps under several settings, side by side."""
