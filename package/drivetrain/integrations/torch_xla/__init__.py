"""torch_xla: a report of what XLA compiled and ran."""
