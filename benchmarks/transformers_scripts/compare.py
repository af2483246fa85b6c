"""Run scripts in the shape of transformers' examples with transformers' Trainer and with ours.

    python benchmarks/transformers_scripts/compare.py FOLDER

leaves the results in a new folder and prints them as a table. The import of the Trainer is all that differs.
Shuffling and dropout are off, and each evaluation is one batch.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

PROVIDERS = ("transformers", "drivetrain")
SCRIPTS = {
    "run_glue": ("bert", "glue", "accuracy", ""),
    "run_translation": (
        "t5",
        "translation",
        "words",
        "--source_lang ko --target_lang en --predict_with_generate",
    ),
}
"""By name: the model, the data, the metric of the evaluation, and further arguments."""


def run(provider: str, name: str, folder: Path) -> None:
    """Run a script in this process, with the Trainer of one provider."""
    os.environ["TRAINER_FROM"] = provider
    (model, data, _, more), material = SCRIPTS[name], folder / "material"
    given = (
        f"--model_name_or_path {material}/{model} --output_dir {folder}/{provider}/{name} --do_train"
        f" --do_eval --train_file {material}/{data}_train.json"
        f" --validation_file {material}/{data}_validation.json"
        " --max_steps 20 --per_device_train_batch_size 8 --per_device_eval_batch_size 1000 --use_cpu"
        " --train_sampling_strategy sequential --learning_rate 2e-3 --logging_steps 1 --save_strategy no"
        f" --report_to none --disable_tqdm True {more}"
    )
    sys.argv = [name, *given.split()]
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")


def results(provider: str, name: str, folder: Path) -> dict[str, Any]:
    """Read what a script has left: its losses, in order, the metric and the files."""
    output = folder / provider / name
    found = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    state = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))
    losses = [each["loss"] for each in state["log_history"] if "loss" in each]
    return {
        "losses": [*losses, found["train_loss"], found["eval_loss"]],
        "metric": found[f"eval_{SCRIPTS[name][2]}"],
        "files": sorted(each.name for each in output.iterdir()),
    }


def main(folder: Path) -> None:
    """Run all, and print the table of docs/explanation/transformers-numbers.md."""
    import material

    material.make(folder / "material")
    print("| script | train loss: transformers / drivetrain | eval loss | eval metric | largest difference |")
    print("| --- | --- | --- | --- | --- |")
    for name, (*_, metric, _) in SCRIPTS.items():
        for each in PROVIDERS:
            run(each, name, folder)
        one, other = (results(each, name, folder) for each in PROVIDERS)
        cells = [f"{one['losses'][n]:.6f} / {other['losses'][n]:.6f}" for n in (-2, -1)]
        cells.append(f"{metric} {one['metric']:.4f} / {other['metric']:.4f}")
        largest = max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True))
        print(f"| {name} | {' | '.join(cells)} | {largest:.1e} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
