"""Generation of sequences in evaluation and prediction."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.integrations.transformers.stored_model import base_of


def generation_config(
    spec: Any, model: Any, options: Mapping[str, Any] | None = None
) -> GenerationConfig | None:
    """Return the configuration of a task's generation; None if it generates nothing.

    Args:
        spec: None or False, True for the model's own, options that replace the model's, or a
            `GenerationConfig`.
        model: The model.
        options: What replaces options of a given `GenerationConfig`.

    Raises:
        ConfigError: The model cannot generate, or an option that `GenerationConfig` does not have.
    """
    if spec is None or spec is False:
        return None
    if not (callable(getattr(model, "can_generate", None)) and model.can_generate()):
        raise ConfigError(
            f"generate={spec!r}: a {type(model).__name__} cannot generate. Leave `generate` out, or take a"
            " model with a language modelling head"
        )
    is_whole = isinstance(spec, GenerationConfig)
    config = copy.deepcopy(spec if is_whole else model.generation_config)
    if is_whole:
        spec = options or True
    if spec is True:
        return config
    if not isinstance(spec, Mapping):
        raise ConfigError(
            "generate must be True, a mapping of options, a GenerationConfig, or None, not"
            f" {type(spec).__name__}"
        )
    unused = config.update(**spec)
    if unused:
        name = next(iter(unused))
        allowed = [each for each in vars(GenerationConfig()) if not each.startswith("_")]
        raise ConfigError(f"generate has no option {name!r}. {nearest(name, allowed)}")
    if not is_whole and "max_length" in spec and "max_new_tokens" not in spec:
        config.max_new_tokens = None  # the model's own, which would take precedence
    config.validate()
    return config


def generate(model: Any, inputs: Mapping[str, Any], config: GenerationConfig, tokenizer: Any) -> Any:
    """Return generated sequences, [samples, length], or what `return_dict_in_generate` asks for.

    If the parameters are sharded, all ranks run forwards until the last one has finished.

    Args:
        model: The model.
        inputs: The columns of a batch, without labels.
        config: The options.
        tokenizer: For `stop_strings`.
    """
    if config.stop_strings is not None:
        inputs = {**inputs, "tokenizer": tokenizer}
    with _without_own_length(base_of(model).generation_config, config):
        return model.generate(**inputs, generation_config=config, synced_gpus=is_sharded(model))


@contextmanager
def _without_own_length(own: GenerationConfig, config: GenerationConfig) -> Iterator[None]:
    """Run the block without the model's own `max_new_tokens` if the options have a `max_length` instead.

    transformers fills in what the options leave out, and `max_new_tokens` takes precedence.
    """
    before = own.max_new_tokens
    if config.max_length is not None and config.max_new_tokens is None:
        own.max_new_tokens = None
    try:
        yield
    finally:
        own.max_new_tokens = before


def is_sharded(model: nn.Module) -> bool:
    """Return whether a forward gathers parameters from other ranks, which must then run as many forwards."""
    return any(hasattr(each, "full_tensor") or hasattr(each, "ds_id") for each in model.parameters())


def check_embeddings(model: Any) -> None:
    """Check that a model has input embeddings, so that noise can be added to them.

    Raises:
        ConfigError: The model lacks them.
    """
    try:
        found = model.get_input_embeddings()
    except NotImplementedError:
        found = None
    if found is None:
        raise ConfigError(
            f"neftune_alpha adds noise to input embeddings, which a {type(model).__name__} does not have."
            " Leave it out"
        )


@contextmanager
def noisy_embeddings(model: Any, alpha: float | None) -> Iterator[None]:
    """Add uniform noise to the output of the input embeddings while the block runs; None adds none.

    Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", ICLR 2024.

    Args:
        model: A model with `get_input_embeddings`.
        alpha: The noise of a sequence of L embeddings of d numbers is at most `alpha` / sqrt(L x d).
    """
    if alpha is None:
        yield
        return

    def add_noise(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        largest = alpha / (embedded.shape[1] * embedded.shape[2]) ** 0.5
        return embedded + torch.zeros_like(embedded).uniform_(-largest, largest)

    hook = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()
