"""Train a causal language model, in the shape of transformers' run_clm.py."""

import math
import os
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
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
    block_size: int = field(default=32, metadata={"help": "Tokens of a sequence."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "json", data_files={"train": data_args.train_file, "validation": data_args.validation_file}
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)

    tokenized_datasets = raw_datasets.map(
        lambda examples: tokenizer(examples["text"]), batched=True, remove_columns=["text"]
    )

    def group_texts(examples):
        joined = {name: list(chain(*examples[name])) for name in examples}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        result = {
            name: [
                each[start : start + data_args.block_size] for start in range(0, total, data_args.block_size)
            ]
            for name, each in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    lm_datasets = tokenized_datasets.map(group_texts, batched=True)

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        return {"accuracy": (preds[:, :-1] == labels[:, 1:]).mean().item()}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=lm_datasets["train"] if training_args.do_train else None,
        eval_dataset=lm_datasets["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(lm_datasets["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(lm_datasets["validation"])
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
