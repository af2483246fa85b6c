"""Makes empty stand-ins for the CUDA libraries that PyPI's build of torch is linked with."""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

LINKED = (
    "torch_global_deps",
    "torch_cuda",
    "torch_python",
    "torch_nvshmem",
    "c10_cuda",
    "torch_cpu",
    "torch",
)
"""torch's own libraries; they look for others beside themselves."""

CUDA = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvJit|nvTools)")

OWNERS = {
    "nccl": "libnccl.so.2",
    "curand": "libcurand.so.10",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "nvshmem": "libnvshmem_host.so.3",
    "cupti": "libcupti.so.12",
    "cusparse": "libcusparse.so.12",
    "cublasLt": "libcublasLt.so.12",
    "cublas": "libcublas.so.12",
    "cufft": "libcufft.so.11",
    "cudnn": "libcudnn.so.9",
    "cusolver": "libcusolver.so.11",
    "cuda": "libcudart.so.12",
    "__cuda": "libcudart.so.12",
}
"""Which library a symbol without a version belongs to, by how its name begins; the first that fits counts."""

TEXT, NOTHING, COUNT = (
    'const char *{}(int code) {{ return "no CUDA"; }}',
    "int {}(int *number) {{ *number = 0; return 0; }}",
    "int {}(int *number) {{ *number = 0; return 100; }}",
)
NO_DEVICE = "int {}(void) {{ return 100; }}"
FUNCTIONS = {
    "cudaGetErrorString": TEXT,
    "cudaGetErrorName": TEXT,
    "cudaGetDeviceCount": COUNT,
    "cudaGetLastError": "int {}(void) {{ return 0; }}",
    "cudaPeekAtLastError": "int {}(void) {{ return 0; }}",
    "cudaRuntimeGetVersion": NOTHING,
    "cudaDriverGetVersion": NOTHING,
}
"""In C, what is called while torch is loaded, or asked whether there is a GPU; 100 is cudaErrorNoDevice."""

Symbols = dict[str, tuple[str, str | None]]
"""By name, the kind of a symbol ("FUNC", "OBJECT") and its version."""


def read(library: Path, *options: str) -> str:  # what readelf tells of a library
    return subprocess.run(["readelf", "-W", *options, library], capture_output=True, text=True).stdout


def wanted(directory: Path) -> tuple[set[str], dict[str, Symbols]]:
    """The CUDA libraries that torch is linked with, and what it asks of each."""
    names: set[str] = set()
    symbols: dict[str, Symbols] = defaultdict(dict)
    for each in LINKED:
        library = directory / f"lib{each}.so"
        names |= set(filter(CUDA.match, re.findall(r"NEEDED\).*\[(.*?)\]", read(library, "-d"))))
        for line in read(library, "--dyn-syms").splitlines():
            fields = line.split()
            if len(fields) < 8 or fields[6] != "UND":
                continue
            name, _, version = fields[7].replace("@@", "@").partition("@")
            if CUDA.match(version):
                symbols[version][name] = (fields[3], version)
            elif version in ("", "NVSHMEM"):
                owner = next((OWNERS[start] for start in OWNERS if name.startswith(start)), None)
                if owner is not None:
                    symbols[owner].setdefault(name, (fields[3], version or None))
    return names, symbols


def source(symbols: Symbols) -> str:  # the stand-in in C
    lines = ["typedef int not_empty;"]
    for name, (kind, _) in symbols.items():
        if kind == "OBJECT":
            lines.append(f"char {name}[4096];")
        elif name.startswith("__cuda"):
            lines.append(f"void *{name}(void) {{ static char memory[256]; return memory; }}")
        else:
            lines.append(FUNCTIONS.get(name, NO_DEVICE).format(name))
    return "\n".join([*lines, ""])


def build(directory: Path, name: str, symbols: Symbols) -> None:
    """Compile one stand-in into torch's directory of libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        code, script = Path(scratch, "stand_in.c"), Path(scratch, "versions.map")
        code.write_text(source(symbols), encoding="ascii")
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}"]
        versions = sorted({version for _, version in symbols.values() if version})
        if versions:
            members = {each: [key for key, (_, v) in symbols.items() if v == each] for each in versions}
            text = [f"{each} {{ global: {'; '.join(keys)}; }};" for each, keys in members.items()]
            script.write_text("\n".join(text), encoding="ascii")
            command.append(f"-Wl,--version-script={script}")
        subprocess.run([*command, "-o", directory / name, code], check=True)


def main() -> None:
    directory = Path(sys.argv[1]) / "torch" / "lib"
    names, symbols = wanted(directory)
    for name in sorted(names):
        build(directory, name, symbols.get(name, {}))


if __name__ == "__main__":
    main()
