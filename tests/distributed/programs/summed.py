"""A program that becomes two ranks, adds up, and tells what it has; started by real interpreters."""

import os
import sys
from pathlib import Path

import torch

from drivetrain.distributed.launch.programs import ensure_ranks

Path("elsewhere").mkdir(exist_ok=True)
os.chdir("elsewhere")
environment = ensure_ranks(2)
assert ensure_ranks(2) == environment
torch.distributed.init_process_group("gloo")
total = torch.tensor([environment.rank + 1])
typed = sys.stdin.read() if environment.rank else ""  # before rank 0 may have taken it
torch.distributed.all_reduce(total)
typed += "" if environment.rank else sys.stdin.read()
words = [environment.launcher, environment.rank, total.item(), torch.get_num_threads(), *sys.argv[1:], typed]
sys.stdout.write(" ".join(map(str, words)) + "\n")
torch.distributed.destroy_process_group()
