"""The user's side of training: the task, its step's output, its hyper-parameters, its optimizers."""
