"""Print the losses of examples/sft.py, dpo.py and grpo.py on one batch, and TRL's on the same batch."""

import copy
import sys

import torch
import transformers
import trl
from datasets import Dataset
from torch.utils.data import DataLoader

from dpo import Preference, collated, pairs
from drivetrain.integrations.transformers import TransformersTask
from grpo import DIGITS, Sorter, all_prompts
from sft import chats, masked, new_model, new_tokenizer

texts = chats()[:8]
tokenizer = new_tokenizer(texts)
model = new_model(tokenizer, 32)
common = {"output_dir": sys.argv[1], "report_to": "none", "use_cpu": True, "bf16": False}
common |= {"per_device_train_batch_size": 8, "max_length": 256}


def of_trl(trainer) -> float:
    data = DataLoader(trainer.train_dataset, batch_size=8, collate_fn=trainer.data_collator)
    return trainer.compute_loss(trainer.model, next(iter(data))).item()


task = TransformersTask(model, processing_class=tokenizer)
batch = transformers.DataCollatorForSeq2Seq(tokenizer)([masked(chat, tokenizer) for chat in texts])
config = trl.SFTConfig(assistant_only_loss=True, **common)
data = Dataset.from_list([{"messages": chat} for chat in texts])
trainer = trl.SFTTrainer(copy.deepcopy(model), args=config, train_dataset=data, processing_class=tokenizer)
print("sft", task.training_step(batch).loss.item(), of_trl(trainer))

preference = Preference(model, beta=0.5)
reference = copy.deepcopy(model)
with torch.no_grad():
    for parameter in preference.model.parameters():  # away from the reference
        parameter += 0.1 * torch.randn_like(parameter)
samples = pairs(texts, tokenizer)
reverse = [" ".join(reversed(chat[-1]["content"].split())) for chat in texts]
data = Dataset.from_list(
    [
        {"prompt": chat[2:3], "chosen": chat[3:], "rejected": [{"role": "assistant", "content": words}]}
        for chat, words in zip(texts, reverse, strict=True)
    ]
)
trainer = trl.DPOTrainer(
    copy.deepcopy(preference.model),
    reference,
    args=trl.DPOConfig(beta=0.5, **common),
    train_dataset=data,
    processing_class=tokenizer,
)
print("dpo", preference.training_step(collated(samples)).loss.item(), of_trl(trainer))

sorter = Sorter(width=32)
prompts = all_prompts()[:8]
tokens = sorter.write(prompts.repeat_interleave(sorter.group, dim=0))
lengths = torch.randint(1, DIGITS + 2, (128, 1))
mask = (torch.arange(DIGITS + 1) < lengths).float()
advantages = torch.randn(128)
before = sorter.token_scores(tokens).detach() + 0.3 * torch.randn(128, DIGITS + 1)
del common["max_length"]
trainer = trl.GRPOTrainer(
    copy.deepcopy(sorter.policy),
    reward_funcs=lambda completions, **_: [0.0 for _ in completions],
    args=trl.GRPOConfig(loss_type="grpo", **common),
    train_dataset=Dataset.from_list([{"prompt": "1"}]),
    processing_class=tokenizer,
)
trainer.current_gradient_accumulation_steps = 1
inputs = {"prompt_ids": tokens[:, : DIGITS + 1], "completion_ids": tokens[:, DIGITS + 1 :]}
inputs |= {"prompt_mask": torch.ones(128, DIGITS + 1), "completion_mask": mask, "advantages": advantages}
inputs["old_per_token_logps"] = before
theirs = trainer.compute_loss(trainer.model, inputs).item()
print("grpo", sorter.surrogate(tokens, before, advantages, mask).item(), theirs)
