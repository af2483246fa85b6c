"""Print how many bytes of memory the export of a large checkpoint adds: `export_peak.py SMALL LARGE OUT`."""

import re
import sys

from drivetrain.integrations.transformers import export_pretrained


def memory(key: str) -> int:
    with open("/proc/self/status") as file:
        return int(re.search(rf"^{key}:\s+(\d+) kB", file.read(), re.M)[1]) * 1024


small, large, out = sys.argv[1:]
export_pretrained(small, out + "/small/out")  # whatever is imported or made once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = memory("VmRSS")
export_pretrained(large, out + "/large/out", max_shard_size="80 MB")
sys.stdout.write(str(memory("VmHWM") - before))
