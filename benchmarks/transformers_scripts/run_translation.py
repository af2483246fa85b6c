"""Train a sequence-to-sequence model, in the shape of transformers' run_translation.py."""

import os
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainingArguments,
    set_seed,
)

if os.environ.get("TRAINER_FROM") == "drivetrain":
    from drivetrain.integrations.transformers import Seq2SeqTrainer
else:
    from transformers import Seq2SeqTrainer


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "A JSON file with the training data."})
    validation_file: str = field(metadata={"help": "A JSON file with the validation data."})
    model_name_or_path: str = field(metadata={"help": "A folder with a model and a tokenizer."})
    source_lang: str = field(metadata={"help": "The language to translate from."})
    target_lang: str = field(metadata={"help": "The language to translate to."})


def main():
    data_args, training_args = HfArgumentParser(
        (DataTrainingArguments, Seq2SeqTrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw_datasets = load_dataset("json", data_files=files)
    tokenizer = AutoTokenizer.from_pretrained(data_args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(data_args.model_name_or_path)

    def preprocess_function(examples):
        inputs = [each[data_args.source_lang] for each in examples["translation"]]
        targets = [each[data_args.target_lang] for each in examples["translation"]]
        labels = tokenizer(text_target=targets, max_length=32, truncation=True)
        return {**tokenizer(inputs, max_length=32, truncation=True), "labels": labels["input_ids"]}

    datasets = raw_datasets.map(preprocess_function, batched=True, remove_columns=["translation"])

    def compute_metrics(eval_preds):
        preds, labels = (np.where(each != -100, each, tokenizer.pad_token_id) for each in eval_preds)
        pairs = zip(
            *(tokenizer.batch_decode(each, skip_special_tokens=True) for each in (preds, labels)), strict=True
        )
        shared = [
            len({*one.split()} & {*other.split()}) / max(1, len({*other.split()})) for one, other in pairs
        ]
        lengths = np.count_nonzero(preds != tokenizer.pad_token_id, axis=1)
        return {"words": float(np.mean(shared)), "gen_len": float(np.mean(lengths))}

    training_args.generation_max_length = training_args.generation_max_length or 32
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=datasets["train"],
        eval_dataset=datasets["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    metrics = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint).metrics
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate(metric_key_prefix="eval")
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
