"""Run tests of transformers' own Trainer with transformers' Trainer, then with ours.

PYTHONPATH=package python benchmarks/transformers_tests.py FOLDER

FOLDER is a copy of transformers' repository, of which `tests`, `conftest.py` and `pyproject.toml` are needed:

    git clone --depth 1 --filter=blob:none --sparse https://github.com/huggingface/transformers FOLDER
    git -C FOLDER sparse-checkout set tests/trainer tests/fixtures

transformers is under the Apache licence 2.0; no file of it is part of this repository. The tests also need
`pip install parameterized`, and no network: those that load something from the Hub fail with either Trainer.

The names of the tests are in `transformers_tests.txt`, each with the reason if it fails with ours. A reason
that begins with "either" is of a test that passes with neither Trainer; one that needs GPUs or the Hub is not
run. Tests of several processes find a tiny model of random weights under the name of one of the Hub. The
program exits with 1 if another test fails with ours, or if fewer than nine of ten pass of those that pass
with transformers' own.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

NAMES = Path(__file__).with_suffix(".txt")
TESTS = "tests/trainer"
MODEL = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
"""A model of the Hub, which the scripts of several processes load."""

_OLD = ("GlueDataset", "GlueDataTrainingArguments", "DataCollatorForWholeWordMask")
"""Names of earlier versions, which test files import and hardly use."""

_MODULE = ("-m", "drivetrain.integrations.transformers")
"""Runs a script with our Trainer."""


def named() -> dict[str, str]:
    """Return the names of the tests, each with the reason why it fails with ours, or an empty text."""
    lines = (each.partition("  # ") for each in NAMES.read_text().splitlines() if each)
    return {name: reason for name, _, reason in lines}


def _same(test: Any) -> Any:
    return test


_IN_SEVERAL = {
    "slow": _same,
    "require_torch_multi_accelerator": _same,
    "backend_device_count": lambda device: 2,
}
"""What lets tests of several processes run here, instead of the names of `transformers.testing_utils`."""


class _Collecting:
    """Lets the files be imported: gives old names, and two processes on CPUs for tests that want two GPUs.

    Args:
        whose: "theirs" or "ours".
    """

    def __init__(self, whose: str) -> None:
        self.utils = cast(Any, importlib.import_module("transformers.testing_utils"))
        self.guards = {name: getattr(self.utils, name) for name in _IN_SEVERAL}
        own = self.utils.execute_subprocess_async

        def execute(command: list[str], **options: Any) -> Any:
            script = next(index for index, each in enumerate(command) if each.endswith(".py"))
            return own([*command[:script], *_MODULE, *command[script:]], **options)

        if whose == "ours":
            self.utils.execute_subprocess_async = execute

    def pytest_collectstart(self, collector: Any) -> None:
        """Set the names before each file is imported: imports make transformers' module anew."""
        package = importlib.import_module("transformers")
        for name in _OLD:
            if not hasattr(package, name):
                setattr(package, name, object)
        for name, guard in self.guards.items():
            setattr(self.utils, name, _IN_SEVERAL[name] if "distributed" in str(collector.nodeid) else guard)


def _child(whose: str, report: str) -> None:
    """Run pytest in this process, in a folder of transformers, with one Trainer or the other."""
    import pytest

    if whose == "ours":
        from drivetrain.integrations.transformers import replace_trainer

        replace_trainer()
    files = sorted({f"{TESTS}/{name.partition('::')[0]}" for name in named()})
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-W", "ignore", f"--junitxml={report}"]
    not_run = [name for name, reason in named().items() if reason.startswith("either: needs")]
    options += [f"--deselect={TESTS}/{name}" for name in not_run]
    sys.exit(
        pytest.main(
            [*files, *options, "--continue-on-collection-errors", *sys.argv[4:]], [_Collecting(whose)]
        )
    )


def _make_model(folder: Path) -> None:
    """Write a tiny model and a tokenizer of bytes, which `from_pretrained` finds in the working directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=pieces[0]).save_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=len(pieces), eos_token_id=0, bos_token_id=0, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def outcomes(whose: str, folder: str, options: list[str]) -> dict[str, bool]:
    """Return whether each test passed, by "file::class::name"; those that were skipped are left out.

    Args:
        whose: "theirs" or "ours".
        folder: The copy of transformers' repository.
        options: Further options of pytest.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    found = {}
    with tempfile.TemporaryDirectory() as made:
        report = f"{made}/report.xml"
        command = [sys.executable, str(Path(__file__).resolve()), "--run", whose, report, *options]
        subprocess.run(command, cwd=folder, env={**environment, "HF_HOME": made}, check=False)
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            module, _, kind = case.get("classname", "").removeprefix("tests.trainer.").rpartition(".")
            kinds = {each.tag for each in case}
            if "skipped" not in kinds:
                path = module.replace(".", "/")
                found[f"{path}.py::{kind}::{case.get('name')}"] = not kinds & {"failure", "error"}
    return found


def main() -> None:
    """Run both, and print the counts and the reasons."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--run":
        _child(sys.argv[2], sys.argv[3])
    folder, options = sys.argv[1], sys.argv[2:]
    if not (Path(folder) / TESTS).is_dir():
        sys.exit(f"{folder!r} has no folder {TESTS}: it is no copy of transformers' repository.\n{__doc__}")
    model = Path(folder) / MODEL
    if not model.exists():
        _make_model(model)
    try:
        theirs, ours = (outcomes(each, folder, options) for each in ("theirs", "ours"))
    finally:
        shutil.rmtree(model)
    known = named()
    pass_there = [name for name, passed in theirs.items() if passed]
    failed = [name for name in pass_there if not ours.get(name)]
    for reason, count in Counter(known.get(name) or "no known reason" for name in failed).most_common():
        print(f"| {reason} | {count} |")
    for name in sorted(set(pass_there) - known.keys()):
        print(f"not in {NAMES.name}: {name}")
    for name in failed:
        if not known.get(name):
            print(f"fails without a known reason: {name}")
    for name, reason in known.items():
        if reason and ours.get(name):
            print(f"passes now: {name}")
    passed = len(pass_there) - len(failed)
    print(f"{len(pass_there)} pass with transformers' Trainer, {passed} of them with ours")
    sys.exit(int(any(not known.get(name) for name in failed) or len(failed) * 10 > len(pass_there)))


if __name__ == "__main__":
    main()
