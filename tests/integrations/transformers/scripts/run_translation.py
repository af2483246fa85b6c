"""Fine-tune a sequence-to-sequence model on translation, in the shape of transformers' run_translation.py."""

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
    source_lang: str = field(metadata={"help": "The language to translate from."})
    target_lang: str = field(metadata={"help": "The language to translate to."})
    max_source_length: int = field(default=24, metadata={"help": "Longer sources are cut."})
    max_target_length: int = field(default=24, metadata={"help": "Longer targets are cut."})
    num_beams: int | None = field(default=None, metadata={"help": "Beams of the search in evaluation."})


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
        inputs = [each[data_args.source_lang] for each in examples["translation"]]
        targets = [each[data_args.target_lang] for each in examples["translation"]]
        model_inputs = tokenizer(inputs, max_length=data_args.max_source_length, truncation=True)
        labels = tokenizer(text_target=targets, max_length=data_args.max_target_length, truncation=True)
        model_inputs["labels"] = labels["input_ids"]
        return model_inputs

    datasets = raw_datasets.map(preprocess_function, batched=True, remove_columns=["translation"])

    def compute_metrics(eval_preds):
        preds, labels = (np.where(each != -100, each, tokenizer.pad_token_id) for each in eval_preds)
        decoded_preds = tokenizer.batch_decode(preds, skip_special_tokens=True)
        decoded_labels = tokenizer.batch_decode(labels, skip_special_tokens=True)
        shared = [
            len(set(one.split()) & set(other.split())) / max(1, len(set(other.split())))
            for one, other in zip(decoded_preds, decoded_labels, strict=True)
        ]
        lengths = np.count_nonzero(preds != tokenizer.pad_token_id, axis=1)
        return {"words": float(np.mean(shared)), "gen_len": float(np.mean(lengths))}

    training_args.generation_max_length = training_args.generation_max_length or data_args.max_target_length
    training_args.generation_num_beams = data_args.num_beams or training_args.generation_num_beams

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
        metrics = trainer.evaluate(metric_key_prefix="eval")
        metrics["eval_samples"] = len(datasets["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        predict_results = trainer.predict(datasets["validation"], metric_key_prefix="predict")
        trainer.log_metrics("predict", predict_results.metrics)
        trainer.save_metrics("predict", predict_results.metrics)
        if trainer.is_world_process_zero():
            predictions = predict_results.predictions
            predictions = np.where(predictions != -100, predictions, tokenizer.pad_token_id)
            lines = tokenizer.batch_decode(predictions, skip_special_tokens=True)
            with open(os.path.join(training_args.output_dir, "generated_predictions.txt"), "w") as writer:
                writer.write("\n".join(lines))


if __name__ == "__main__":
    main()
