"""Fine-tune a model on text classification, in the shape of transformers' run_glue.py."""

import os
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

if os.environ.get("TRAINER_FROM") == "drivetrain":
    from drivetrain.integrations.transformers import Trainer
else:
    from transformers import Trainer


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "A JSON file with the training data."})
    validation_file: str = field(metadata={"help": "A JSON file with the validation data."})
    model_name_or_path: str = field(metadata={"help": "A folder with a model and a tokenizer."})


def main():
    data_args, training_args = HfArgumentParser(
        (DataTrainingArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw_datasets = load_dataset("json", data_files=files)
    label_list = sorted(raw_datasets["train"].unique("label"))
    label_to_id = {name: number for number, name in enumerate(label_list)}

    config = AutoConfig.from_pretrained(data_args.model_name_or_path, num_labels=len(label_list))
    tokenizer = AutoTokenizer.from_pretrained(data_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(data_args.model_name_or_path, config=config)
    model.config.label2id = label_to_id
    model.config.id2label = {number: name for name, number in label_to_id.items()}

    def preprocess_function(examples):
        result = tokenizer(examples["sentence"], max_length=32, truncation=True)
        result["label"] = [label_to_id[name] for name in examples["label"]]
        return result

    raw_datasets = raw_datasets.map(preprocess_function, batched=True)

    def compute_metrics(p: EvalPrediction):
        return {"accuracy": (p.predictions.argmax(axis=1) == p.label_ids).mean().item()}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=raw_datasets["train"],
        eval_dataset=raw_datasets["validation"],
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    metrics = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint).metrics
    metrics["train_samples"] = len(raw_datasets["train"])
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate(eval_dataset=raw_datasets["validation"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
