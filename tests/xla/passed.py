"""Tell whether XLA's tests have to run: `tests/xla/passed.py` fails if they have to, `--write` notes it."""

import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "package" / "drivetrain"


def digest() -> str:  # return the digest of all files that the tests depend on
    found = hashlib.sha256()
    files = [*PACKAGE.glob("strategies/xla/**/*.py"), *PACKAGE.glob("testing/**/*.py"), *HERE.glob("*.py")]
    for path in [*sorted(files), ROOT / "Makefile"]:
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def main() -> int:  # compare or write; return the exit code
    file = HERE / "passed.txt"
    if "--write" in sys.argv:
        file.write_text(f"{digest()}\n", encoding="utf-8")
        print(f"XLA's tests passed; commit {file.relative_to(ROOT)}")
        return 0
    if file.exists() and file.read_text(encoding="utf-8").strip() == digest():
        print("XLA: nothing that its tests depend on has changed since they passed")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
