"""Tiny models of transformers, made from their configurations, with ragged data."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from tests.integrations.lazy import Lazy
from torch import Tensor
from torch.utils.data import DataLoader

transformers = Lazy("transformers")

WORDS = 99
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_ENCODER: dict[str, Any] = {"vocab_size": WORDS, "num_labels": 3, "max_position_embeddings": 32, **_SIZES}
_ENCODER |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
_BART: dict[str, Any] = {"vocab_size": WORDS, "d_model": 16, "max_position_embeddings": 32}
for _part in ("encoder", "decoder"):
    _BART |= {f"{_part}_layers": 2, f"{_part}_attention_heads": 2, f"{_part}_ffn_dim": 16}
_BART |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
_VISION = {"image_size": 8, "patch_size": 4, **_SIZES}
_IDS = {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
_TEXT = {"vocab_size": WORDS, "max_position_embeddings": 16, **_SIZES, **_IDS}

Sample = dict[str, Tensor]


class Family(NamedTuple):
    make: Callable[[], Any]
    sample: Callable[[torch.Generator, int], Sample]
    weight: Callable[[Mapping[str, Tensor]], float]


def words(generator: torch.Generator, length: int) -> Tensor:
    return torch.randint(3, WORDS, (length,), generator=generator)


def classified(generator: torch.Generator, length: int) -> Sample:
    return {"input_ids": words(generator, length), "labels": torch.randint(3, (), generator=generator)}


def tagged(generator: torch.Generator, length: int) -> Sample:
    return {"input_ids": words(generator, length), "labels": torch.randint(3, (length,), generator=generator)}


def masked(generator: torch.Generator, length: int) -> Sample:
    given = words(generator, length)
    labels = torch.where(torch.arange(length) % 2 == 0, given, -100)
    return {"input_ids": given, "labels": labels}


def continued(generator: torch.Generator, length: int) -> Sample:
    given = words(generator, length)
    return {"input_ids": given, "labels": given.clone()}


def translated(generator: torch.Generator, length: int) -> Sample:
    return {"input_ids": words(generator, 5), "labels": words(generator, length)}


def pictured(generator: torch.Generator, length: int) -> Sample:
    pixels = torch.randn(3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(3, (), generator=generator)}


def spoken(generator: torch.Generator, length: int) -> Sample:
    return {"input_values": torch.randn(80, generator=generator), "labels": words(generator, length)}


def transcribed(generator: torch.Generator, length: int) -> Sample:
    return {"input_features": torch.randn(8, 16, generator=generator), "labels": words(generator, length)}


def unmasked(batch: Mapping[str, Tensor]) -> float:
    return float((batch["labels"] != -100).sum())


def shifted(batch: Mapping[str, Tensor]) -> float:
    return float((batch["labels"][:, 1:] != -100).sum())


def samples(batch: Mapping[str, Tensor]) -> float:
    return float(len(next(iter(batch.values()))))


def _bert(head: str, **options: Any) -> Any:
    return getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**_ENCODER | options))


def _gpt2() -> Any:
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 2}
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options))


def _t5() -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> Any:
    config = transformers.ViTConfig(**_VISION, num_labels=3, hidden_dropout_prob=0.0)
    return transformers.ViTForImageClassification(config)


def _wav2vec2() -> Any:
    sizes = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    dropouts = "layerdrop hidden_dropout attention_dropout activation_dropout feat_proj_dropout final_dropout"
    options: dict[str, Any] = {"ctc_loss_reduction": "mean", "apply_spec_augment": False}
    options |= {**dict.fromkeys(dropouts.split(), 0.0)}
    made = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**_ENCODER, **sizes, **options))
    made.wav2vec2.masked_spec_embed.requires_grad_(False)  # which only SpecAugment uses
    return made


def _whisper() -> Any:
    sizes = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
    ids = {"decoder_start_token_id": 0, "begin_suppress_tokens": None, "suppress_tokens": None, **_IDS}
    config = transformers.WhisperConfig(**_BART, **sizes, **ids)
    return transformers.WhisperForConditionalGeneration(config)


def _llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, num_key_value_heads=2))


FAMILIES: dict[str, Family] = {
    "bert, classes": Family(partial(_bert, "SequenceClassification"), classified, samples),
    "bert, tags": Family(partial(_bert, "TokenClassification"), tagged, unmasked),
    "bert, masked": Family(partial(_bert, "MaskedLM"), masked, unmasked),
    "gpt2": Family(_gpt2, continued, shifted),
    "llama": Family(_llama, continued, shifted),
    "t5": Family(_t5, translated, unmasked),
    "vit": Family(_vit, pictured, samples),
    "wav2vec2": Family(_wav2vec2, spoken, samples),
    "whisper": Family(_whisper, transcribed, unmasked),
}


def padded(rows: list[Sample]) -> Sample:  # a batch: sequences filled up on the right, labels with -100
    batch = {}
    for name in rows[0]:
        columns = [each[name] for each in rows]
        if columns[0].ndim == 1 and name in ("input_ids", "labels"):
            value = -100 if name == "labels" else 1
            batch[name] = torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=value)
        else:
            batch[name] = torch.stack(columns)
    if "input_ids" in batch:
        lengths = torch.tensor([len(each["input_ids"]) for each in rows])
        batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


def model(family: str) -> Any:
    transformers.utils.logging.disable_progress_bar()  # whose thread would stay
    torch.manual_seed(3)
    return FAMILIES[family].make()


def rows(family: str, count: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    return [FAMILIES[family].sample(generator, 3 + number % 4) for number in range(count)]


def loader(family: str, count: int = 8, size: int = 2) -> DataLoader[Any]:
    data: Any = rows(family, count)
    return DataLoader(data, batch_size=size, collate_fn=padded)
