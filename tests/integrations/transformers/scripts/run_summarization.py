"""Fine-tune a model on summarisation, in the shape of transformers' run_summarization.py."""

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
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with a model and a tokenizer."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "A JSON file with the training data."})
    validation_file: str = field(metadata={"help": "A JSON file with the validation data."})
    text_column: str = field(default="text", metadata={"help": "The column of the texts."})
    summary_column: str = field(default="summary", metadata={"help": "The column of the summaries."})
    max_source_length: int = field(default=64, metadata={"help": "Longer texts are cut."})
    max_target_length: int = field(default=16, metadata={"help": "Longer summaries are cut."})
    source_prefix: str = field(default="", metadata={"help": "What comes before each text."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "json", data_files={"train": data_args.train_file, "validation": data_args.validation_file}
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path)

    def preprocess_function(examples):
        inputs = [data_args.source_prefix + each for each in examples[data_args.text_column]]
        model_inputs = tokenizer(inputs, max_length=data_args.max_source_length, truncation=True)
        labels = tokenizer(
            text_target=examples[data_args.summary_column],
            max_length=data_args.max_target_length,
            truncation=True,
        )
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    columns = [data_args.text_column, data_args.summary_column]
    datasets = raw_datasets.map(preprocess_function, batched=True, remove_columns=columns)

    def unigram_f(one, other):
        """The F measure of shared words, as in ROUGE-1."""
        one, other = set(one.split()), set(other.split())
        return 2 * len(one & other) / max(1, len(one) + len(other))

    def compute_metrics(eval_preds):
        preds, labels = (np.where(each != -100, each, tokenizer.pad_token_id) for each in eval_preds)
        decoded_preds = tokenizer.batch_decode(preds, skip_special_tokens=True)
        decoded_labels = tokenizer.batch_decode(labels, skip_special_tokens=True)
        found = [unigram_f(*each) for each in zip(decoded_preds, decoded_labels, strict=True)]
        return {"unigrams": float(np.mean(found))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=datasets["train"] if training_args.do_train else None,
        eval_dataset=datasets["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(datasets["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(max_length=data_args.max_target_length, metric_key_prefix="eval")
        metrics["eval_samples"] = len(datasets["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
