"""Fine-tune a model on image classification, in the shape of transformers' run_image_classification.py."""

import os
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
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
    train_dir: str = field(metadata={"help": "A folder with a folder of training images for each class."})
    validation_dir: str = field(
        metadata={"help": "A folder with a folder of validation images for each class."}
    )


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A folder with a model and an image processor."})


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)

    files = {
        "train": os.path.join(data_args.train_dir, "**"),
        "validation": os.path.join(data_args.validation_dir, "**"),
    }
    dataset = load_dataset("imagefolder", data_files=files)
    labels = dataset["train"].features["label"].names

    def collate_fn(examples):
        pixel_values = torch.stack([example["pixel_values"] for example in examples])
        return {"pixel_values": pixel_values, "labels": torch.tensor([each["label"] for each in examples])}

    def compute_metrics(p):
        return {"accuracy": float(np.mean(np.argmax(p.predictions, axis=1) == p.label_ids))}

    config = AutoConfig.from_pretrained(
        model_args.model_name_or_path,
        num_labels=len(labels),
        label2id={name: str(number) for number, name in enumerate(labels)},
        id2label={str(number): name for number, name in enumerate(labels)},
    )
    model = AutoModelForImageClassification.from_pretrained(model_args.model_name_or_path, config=config)
    image_processor = AutoImageProcessor.from_pretrained(model_args.model_name_or_path)

    def transforms(example_batch):
        images = [image.convert("RGB") for image in example_batch["image"]]
        example_batch["pixel_values"] = [
            image_processor(each, return_tensors="pt").pixel_values[0] for each in images
        ]
        return example_batch

    dataset["train"].set_transform(transforms)
    dataset["validation"].set_transform(transforms)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"] if training_args.do_train else None,
        eval_dataset=dataset["validation"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=image_processor,
        data_collator=collate_fn,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", train_result.metrics)
        trainer.save_metrics("train", train_result.metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
