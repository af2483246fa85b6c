"""Prints what the variable of MPS's fallback is at the moment at which torch is first looked for."""

import os
import sys

found = []


class Noting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            found.append(os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK"))


sys.meta_path.insert(0, Noting())
if sys.argv[1] == "library":
    import drivetrain

    drivetrain.enable_mps_fallback()
    drivetrain.enable_mps_fallback()
    import torch  # noqa: F401
else:
    from drivetrain.cli.main import main

    main(["fit", "--mps-fallback", "--task", "nowhere.Task"])
print(found[0])
