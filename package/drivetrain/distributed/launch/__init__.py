"""Start the ranks of a job: our own processes, forks, torchrun, or another launcher."""
