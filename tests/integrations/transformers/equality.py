"""Scripts in the shape of transformers' examples, run with transformers' Trainer and with ours.

    python tests/integrations/transformers/equality.py [SCRIPT ...]

prints the table of both results. The scripts are those in `scripts/`; the import of the Trainer is the only
difference. Shuffling and dropout are off, and each evaluation is one batch.

The last row is expected to differ: transformers divides the loss of a GPT-2 by all labels, although the
model predicts none for the first of a sequence. The loss of a block of 32 labels is then 31/32 of the mean.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"
PROVIDERS = ("transformers", "drivetrain")
BOUND = 1e-5
"""The largest difference of a loss."""


class Script(NamedTuple):
    """What a script is given, and the metric of its evaluation."""

    file: str
    model: str
    data: str
    metric: str
    arguments: str = ""


_TRANSLATION = "--source_lang ko --target_lang en --predict_with_generate --do_predict"
TABLE = {
    each.file: each
    for each in (
        Script("run_glue", "bert", "glue", "accuracy"),
        Script("run_clm", "llama", "clm", "accuracy"),
        Script("run_translation", "t5", "translation", "words", _TRANSLATION),
        Script("run_summarization", "t5", "summarization", "unigrams", "--predict_with_generate"),
        Script("run_qa", "bert", "qa", "f1"),
        Script("run_ner", "bert", "ner", "accuracy", "--do_predict"),
        Script("run_image_classification", "vit", "images", "accuracy", "--remove_unused_columns False"),
        Script("run_speech_recognition_ctc", "wav2vec2", "speech", "cer"),
    )
}
OTHER = "run_clm with a GPT-2"
"""The row in which transformers' loss is another one than the mean over the labels."""
TABLE[OTHER] = Script("run_clm", "gpt2", "clm", "accuracy")


class Result(NamedTuple):
    """The results of a script under one import."""

    losses: list[float]
    train_loss: float
    eval_loss: float
    metric: float
    files: list[str]


def arguments(name: str, material: Path, output: Path, updates: int) -> list[str]:
    """The command line of a script."""
    script = TABLE[name]
    if script.data == "images":
        data = f"--train_dir {material}/images/train --validation_dir {material}/images/validation"
    else:
        data = f"--train_file {material}/{script.data}_train.json"
        data += f" --validation_file {material}/{script.data}_validation.json"
    common = (
        f"--model_name_or_path {material}/{script.model} --output_dir {output} --do_train --do_eval"
        f" --max_steps {updates} --per_device_train_batch_size 8 --per_device_eval_batch_size 1000"
        " --train_sampling_strategy sequential --learning_rate 2e-3 --logging_steps 1 --save_strategy no"
        " --report_to none --use_cpu --disable_tqdm True"
    )
    return f"{common} {data} {script.arguments}".split()


def run(provider: str, name: str, folder: Path, updates: int = 20) -> None:
    """Run a script in this process, with the Trainer of one provider."""
    os.environ["TRAINER_FROM"] = provider
    output = folder / provider / name.replace(" ", "_")
    sys.argv = [name, *arguments(name, folder / "material", output, updates)]
    runpy.run_path(str(SCRIPTS / f"{TABLE[name].file}.py"), run_name="__main__")


def results(name: str, outputs: Path) -> Result:
    """Read what a script has left in its output directory."""
    folder = outputs / name.replace(" ", "_")
    found = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return Result(
        [each["loss"] for each in state["log_history"] if "loss" in each],
        found["train_loss"],
        found["eval_loss"],
        found[f"eval_{TABLE[name].metric}"],
        sorted(each.name for each in folder.iterdir()),
    )


def compared(names: list[str], folder: Path) -> dict[str, dict[str, Result]]:
    """Run scripts under both imports, in a process of their own; the results by script and provider."""
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **variables, "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--in", str(folder), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a script failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return {name: {each: results(name, folder / each) for each in PROVIDERS} for name in names}


def run_all(names: list[str], folder: Path) -> None:
    """Make the data and the models, and run scripts."""
    sys.path.insert(0, str(SCRIPTS))
    import material

    material.make(folder / "material")
    for name in names:
        for provider in PROVIDERS:
            run(provider, name, folder)


def largest_difference(one: Result, other: Result) -> float:
    """The largest difference of any loss."""
    pairs = zip(
        [*one.losses, one.train_loss, one.eval_loss],
        [*other.losses, other.train_loss, other.eval_loss],
        strict=True,
    )
    return max(abs(a - b) for a, b in pairs)


def table(found: dict[str, dict[str, Result]]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| script | train loss: transformers / drivetrain | eval loss | eval metric | largest difference |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, both in found.items():
        one, other = (both[each] for each in PROVIDERS)
        lines.append(
            f"| {name} | {one.train_loss:.6f} / {other.train_loss:.6f} | {one.eval_loss:.6f} /"
            f" {other.eval_loss:.6f} | {TABLE[name].metric} {one.metric:.4f} / {other.metric:.4f} |"
            f" {largest_difference(one, other):.1e} |"
        )
    return "\n".join(lines)


def main(given: list[str]) -> None:
    """Print the table."""
    if given[:1] == ["--in"]:
        run_all(given[2:], Path(given[1]))
        return
    names: list[Any] = given or list(TABLE)
    with tempfile.TemporaryDirectory() as folder:
        print(table(compared(names, Path(folder))))


if __name__ == "__main__":
    main(sys.argv[1:])
