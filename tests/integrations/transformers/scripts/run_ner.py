"""Fine-tune a model on token classification, in the shape of transformers' run_ner.py."""

import os
from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

if os.environ.get("TRAINER_FROM") == "drivetrain":
    from drivetrain.integrations.transformers import Trainer
else:
    from transformers import Trainer


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with a model and a tokenizer."})


@dataclass
class DataTrainingArguments:
    train_file: str = field(metadata={"help": "A JSON file with the training data."})
    validation_file: str = field(metadata={"help": "A JSON file with the validation data."})
    max_seq_length: int = field(default=64, metadata={"help": "Longer sequences are cut."})
    label_all_tokens: bool = field(default=False, metadata={"help": "Label every part of a word."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "json", data_files={"train": data_args.train_file, "validation": data_args.validation_file}
    )
    label_list = sorted({tag for tags in raw_datasets["train"]["ner_tags"] for tag in tags})
    label_to_id = {name: number for number, name in enumerate(label_list)}

    config = AutoConfig.from_pretrained(
        model_args.model_name_or_path,
        num_labels=len(label_list),
        label2id=label_to_id,
        id2label=dict(enumerate(label_list)),
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForTokenClassification.from_pretrained(model_args.model_name_or_path, config=config)

    def tokenize_and_align_labels(examples):
        tokenized = tokenizer(
            examples["tokens"], max_length=data_args.max_seq_length, truncation=True, is_split_into_words=True
        )
        labels = []
        for number, tags in enumerate(examples["ner_tags"]):
            previous, row = None, []
            for word in tokenized.word_ids(batch_index=number):
                is_labelled = word is not None and (word != previous or data_args.label_all_tokens)
                row.append(label_to_id[tags[word]] if is_labelled else -100)
                previous = word
            labels.append(row)
        tokenized["labels"] = labels
        return tokenized

    datasets = raw_datasets.map(tokenize_and_align_labels, batched=True)

    def compute_metrics(p):
        predictions, labels = p
        kept = labels != -100
        return {"accuracy": (predictions.argmax(axis=2) == labels)[kept].mean().item()}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=datasets["train"] if training_args.do_train else None,
        eval_dataset=datasets["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        metrics = train_result.metrics
        trainer.save_model()
        metrics["train_samples"] = len(datasets["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(datasets["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        predictions, labels, metrics = trainer.predict(datasets["validation"], metric_key_prefix="predict")
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)
        rows = [
            " ".join(label_list[each] for each, label in zip(row, given, strict=True) if label != -100)
            for row, given in zip(predictions.argmax(axis=2), labels, strict=True)
        ]
        if trainer.is_world_process_zero():
            with open(os.path.join(training_args.output_dir, "predictions.txt"), "w") as writer:
                writer.write("\n".join(rows))


if __name__ == "__main__":
    main()
