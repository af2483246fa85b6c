"""Fine-tune a model on extractive question answering, in the shape of transformers' run_qa.py."""

import os
from dataclasses import dataclass, field

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    EvalPrediction,
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
    max_seq_length: int = field(default=96, metadata={"help": "The length of all sequences."})
    doc_stride: int = field(default=32, metadata={"help": "Tokens that two parts of a context share."})


class QuestionAnsweringTrainer(Trainer):
    """Turns logits into answers before the metrics are computed."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        examples = self.eval_examples if eval_examples is None else eval_examples
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.predict(dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
        finally:
            self.compute_metrics = compute_metrics
        predictions = self.post_process_function(examples, dataset, output.predictions)
        found = self.compute_metrics(predictions)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        self.log(output.metrics)
        return output.metrics


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    raw_datasets = load_dataset(
        "json", data_files={"train": data_args.train_file, "validation": data_args.validation_file}
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(model_args.model_name_or_path)

    def prepare_features(examples):
        tokenized = tokenizer(
            examples["question"],
            examples["context"],
            truncation="only_second",
            max_length=data_args.max_seq_length,
            stride=data_args.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        samples = tokenized.pop("overflow_to_sample_mapping")
        tokenized["start_positions"], tokenized["end_positions"], tokenized["example_id"] = [], [], []
        for number, offsets in enumerate(tokenized["offset_mapping"]):
            answers = examples["answers"][samples[number]]
            begin = answers["answer_start"][0]
            end = begin + len(answers["text"][0])
            inside = [
                position
                for position, (first, last) in enumerate(offsets)
                if tokenized.sequence_ids(number)[position] == 1 and first < end and last > begin
            ]
            is_whole = inside and offsets[inside[0]][0] <= begin and offsets[inside[-1]][1] >= end
            tokenized["start_positions"].append(inside[0] if is_whole else 0)
            tokenized["end_positions"].append(inside[-1] if is_whole else 0)
            tokenized["example_id"].append(examples["id"][samples[number]])
        return tokenized

    columns = raw_datasets["train"].column_names
    features = raw_datasets.map(prepare_features, batched=True, remove_columns=columns)

    def post_processing_function(examples, features, predictions):
        start_logits, end_logits = predictions[:2]
        best = {}
        for number, feature in enumerate(features):
            context = {each["id"]: each["context"] for each in examples}[feature["example_id"]]
            start = int(np.argmax(start_logits[number]))
            end = start + int(np.argmax(end_logits[number][start : start + 30]))
            score = float(start_logits[number][start] + end_logits[number][end])
            text = context[feature["offset_mapping"][start][0] : feature["offset_mapping"][end][1]]
            if score > best.get(feature["example_id"], (-np.inf, ""))[0]:
                best[feature["example_id"]] = (score, text)
        answers = [each["answers"]["text"][0] for each in examples]
        return EvalPrediction(predictions=[best[each["id"]][1] for each in examples], label_ids=answers)

    def compute_metrics(p: EvalPrediction):
        shared = []
        for one, other in zip(p.predictions, p.label_ids, strict=True):
            one, other = set(one.split()), set(other.split())
            shared.append(2 * len(one & other) / max(1, len(one) + len(other)))
        return {"f1": float(np.mean(shared))}

    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=features["train"] if training_args.do_train else None,
        eval_dataset=features["validation"] if training_args.do_eval else None,
        eval_examples=raw_datasets["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        post_process_function=post_processing_function,
        compute_metrics=compute_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(features["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(features["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
