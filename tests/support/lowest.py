"""The lowest versions of setup.cfg, as constraints for pip: `python tests/support/lowest.py EXTRA,EXTRA`."""

import configparser
import re
import sys
from pathlib import Path

SETUP = Path(__file__).parents[2] / "setup.cfg"


def lowest(*extras: str) -> list[str]:
    """Return `name==version.*` for each bound of the package and of these extras; make chooses torch."""
    setup = configparser.ConfigParser()
    setup.read(SETUP, encoding="utf-8")
    texts = [
        setup["options"]["install_requires"],
        *(setup["options.extras_require"][extra] for extra in extras),
    ]
    bounds = re.findall(r"^([\w.-]+)(?:\[.*\])?>=([\d.]+)", "\n".join(texts), re.M)
    return sorted({f"{name}=={version}.*" for name, version in bounds if name != "torch"})


if __name__ == "__main__":
    print("\n".join(lowest(*sys.argv[1].split(","))))
