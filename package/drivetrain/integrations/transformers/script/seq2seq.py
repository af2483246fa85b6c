"""transformers' Seq2SeqTrainer: a Trainer whose evaluations may generate sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.trainer_utils import PredictionOutput

from drivetrain.core.errors import ConfigError
from drivetrain.integrations.transformers.generation import generation_config
from drivetrain.integrations.transformers.log_names import EVALUATION, TEST
from drivetrain.integrations.transformers.script.script_task import ScriptTask
from drivetrain.integrations.transformers.script.trainer import Trainer
from drivetrain.integrations.transformers.stored_model import base_of


class Seq2SeqTrainer(Trainer):
    """A `Trainer` that generates in evaluations and predictions, with `predict_with_generate=True`.

    `evaluate` and `predict` take options of `GenerationConfig`, which replace those of the arguments. Rows
    of different lengths are padded with -100. Arguments and errors are those of `Trainer`.
    """

    generates = True
    _options: Mapping[str, Any] = {}

    _pad_tensors_to_max_len = transformers.Seq2SeqTrainer._pad_tensors_to_max_len

    @property
    def _gen_kwargs(self) -> dict[str, Any]:
        """The options of the evaluation in progress, for a `prediction_step` that generates."""
        args = self.args
        given = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
        return {**{name: value for name, value in given.items() if value is not None}, **self._options}

    @_gen_kwargs.setter
    def _gen_kwargs(self, options: Mapping[str, Any]) -> None:
        self._options = {name: value for name, value in options.items() if value is not None}

    def _make_task(self) -> ScriptTask:
        task = super()._make_task()
        self._generation()  # checks that the model can generate
        given = getattr(self.args, "generation_config", None)
        config = given if isinstance(given, GenerationConfig) else self._generate
        if isinstance(config, GenerationConfig):
            try:
                config.validate(strict=True)
            except ValueError as error:  # saving the model would raise it at the end
                raise ConfigError(f"args.generation_config: {error}") from error
        return task

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = EVALUATION,
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does, with options of the generation."""
        self._options = self._checked_options(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = TEST,
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict as `Trainer.predict` does, with options of the generation."""
        self._options = self._checked_options(gen_kwargs)
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, generated sequences and labels of a batch."""
        generation = self._generation_of({**self._options, **self._checked_options(gen_kwargs)})
        loss, outputs, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if generation is None or prediction_loss_only:
            return loss, outputs, labels
        return loss, self._task.generated(inputs, generation), labels

    def _checked_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in given.items() if value is not None}
        if options and self._generate is None:
            raise ConfigError(
                f"{next(iter(options))}=... is for generation: give predict_with_generate=True in the"
                " arguments"
            )
        return options

    def _generation(self) -> GenerationConfig | None:
        return self._generation_of(self._options)

    def _generation_of(self, options: Mapping[str, Any]) -> GenerationConfig | None:
        base = base_of(self.model)
        if (given := options.get("generation_config")) is not None:
            others = {**self._gen_kwargs, **options}
            del others["generation_config"]
            return generation_config(given, base, others)
        config = generation_config(self._generate, base)
        if config is None or not options:
            return config
        kept = config.to_diff_dict()
        if "max_length" in options:
            kept.pop("max_new_tokens", None)  # it would take precedence
        return generation_config({**kept, **options}, base)
