"""Fine-tune a model on speech recognition, in the shape of transformers' run_speech_recognition_ctc.py."""

import json
import os
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForCTC,
    HfArgumentParser,
    TrainingArguments,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2Processor,
    set_seed,
)

if os.environ.get("TRAINER_FROM") == "drivetrain":
    from drivetrain.integrations.transformers import Trainer
else:
    from transformers import Trainer


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with a model and a feature extractor."})
    freeze_feature_encoder: bool = field(
        default=False, metadata={"help": "Keep the first layers as they are."}
    )
    ctc_loss_reduction: str = field(default="mean", metadata={"help": "The mean or the sum over samples."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "A JSON file with the training data."})
    validation_file: str = field(metadata={"help": "A JSON file with the validation data."})
    audio_column_name: str = field(default="audio", metadata={"help": "The column of the sounds."})
    text_column_name: str = field(default="text", metadata={"help": "The column of the transcripts."})


@dataclass
class DataCollatorCTCWithPadding:
    """Pads the sounds and the transcripts each to the longest one."""

    processor: Wav2Vec2Processor

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        sounds = [{"input_values": each["input_values"]} for each in features]
        batch = self.processor.feature_extractor.pad(sounds, padding=True, return_tensors="pt")
        texts = [{"input_ids": each["labels"]} for each in features]
        labels = self.processor.tokenizer.pad(texts, padding=True, return_tensors="pt")
        batch["labels"] = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
        return batch


def create_vocabulary(datasets, column, folder):
    """Write a vocabulary of all characters of the transcripts."""
    letters = sorted({letter for part in datasets.values() for text in part[column] for letter in text})
    vocabulary = {letter: number for number, letter in enumerate([*letters, "|", "[UNK]", "[PAD]"])}
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, "vocab.json")
    with open(path, "w") as file:
        json.dump(vocabulary, file)
    return path


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "json", data_files={"train": data_args.train_file, "validation": data_args.validation_file}
    )
    vocabulary = create_vocabulary(raw_datasets, data_args.text_column_name, training_args.output_dir)
    tokenizer = Wav2Vec2CTCTokenizer(vocabulary)
    tokenizer.add_special_tokens({"unk_token": "[UNK]", "pad_token": "[PAD]"})
    feature_extractor = AutoFeatureExtractor.from_pretrained(model_args.model_name_or_path)
    processor = Wav2Vec2Processor(feature_extractor=feature_extractor, tokenizer=tokenizer)

    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    config.update(
        {
            "ctc_loss_reduction": model_args.ctc_loss_reduction,
            "pad_token_id": tokenizer.pad_token_id,
            "vocab_size": len(tokenizer),
        }
    )
    model = AutoModelForCTC.from_pretrained(model_args.model_name_or_path, config=config)
    if model_args.freeze_feature_encoder:
        model.freeze_feature_encoder()

    def prepare_dataset(row):
        sound = np.asarray(row[data_args.audio_column_name], dtype=np.float32)
        found = feature_extractor(sound, sampling_rate=feature_extractor.sampling_rate)
        labels = tokenizer(row[data_args.text_column_name]).input_ids
        return {"input_values": found.input_values[0], "labels": labels}

    columns = raw_datasets["train"].column_names
    vectorized_datasets = raw_datasets.map(prepare_dataset, remove_columns=columns)

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(pred):
        """The share of wrong characters, position by position."""
        pred.label_ids[pred.label_ids == -100] = tokenizer.pad_token_id
        pred.predictions[pred.predictions == -100] = tokenizer.pad_token_id
        found = tokenizer.batch_decode(pred.predictions)
        true = tokenizer.batch_decode(pred.label_ids, group_tokens=False)
        wrong = [
            sum(a != b for a, b in zip(one.ljust(len(other)), other, strict=False)) / max(1, len(other))
            for one, other in zip(found, true, strict=True)
        ]
        return {"cer": float(np.mean(wrong))}

    trainer = Trainer(
        model=model,
        data_collator=DataCollatorCTCWithPadding(processor),
        args=training_args,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        train_dataset=vectorized_datasets["train"] if training_args.do_train else None,
        eval_dataset=vectorized_datasets["validation"] if training_args.do_eval else None,
        processing_class=processor,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(vectorized_datasets["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(vectorized_datasets["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
