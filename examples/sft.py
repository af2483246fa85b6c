"""Supervised fine-tuning on chats: a small Llama learns the answers alone, marked by the chat template.

    python examples/sft.py --steps 200
    python examples/sft.py --run-dir run --strategy fsdp --devices 2    # killed; the same command goes on

The chats ask for functions of Python's standard library, and their docstrings answer. The tokenizer is
trained on the chats, because nothing is downloaded; `from_pretrained` of a model and its tokenizer replaces
`new_model` and `new_tokenizer`.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drivetrain import CheckpointConfig, OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask

TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.role == "assistant" -%}
{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else -%}{{ message.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
"""A chat template. Its `generation` block is what the model is to write, and what the loss counts."""


def chats() -> list[list[dict[str, str]]]:
    """Return chats about functions of the standard library, of two questions each, in a random order."""
    turns = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text:
                question = {"role": "user", "content": f"What does {path.stem}.{node.name} do?"}
                turns.append([question, {"role": "assistant", "content": text.partition("\n\n")[0]}])
    random.Random(0).shuffle(turns)
    return [first + second for first, second in zip(turns[::2], turns[1::2], strict=False)]


def new_tokenizer(texts: list[list[dict[str, str]]]) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE with a chat template."""
    special = ["<pad>", "<end>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([turn["content"] for chat in texts for turn in chat], trainer)
    known = {"pad_token": "<pad>", "eos_token": "<end>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **known)


def new_model(tokenizer: transformers.PreTrainedTokenizerFast, width: int) -> transformers.PreTrainedModel:
    """Return a Llama with random weights, drawn from seed 0."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes |= {"num_attention_heads": 4, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends, bos_token_id=None))


def masked(
    chat: list[dict[str, str]], tokenizer: transformers.PreTrainedTokenizerFast, longest: int = 256
) -> dict[str, list[int]]:
    """Return a chat's tokens, with labels for those that the assistant writes and -100 for the others."""
    found = tokenizer.apply_chat_template(
        chat, return_dict=True, return_assistant_tokens_mask=True, truncation=True, max_length=longest
    )
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return {"input_ids": found["input_ids"], "labels": [token if own else -100 for token, own in pairs]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--width", type=int, default=64, help="the model's width; a multiple of 8")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    parser.add_argument("--run-dir", help="where files go; a run there is resumed")
    options = parser.parse_args()

    texts = chats()
    tokenizer = new_tokenizer(texts[40:])
    samples = [masked(chat, tokenizer) for chat in texts]
    others, data = Dataset.from_list(samples[:40]), Dataset.from_list(samples[40:])
    optimizer = OptimizerConfig("adamw", lr=3e-3, schedule="cosine", warmup_ratio=0.1)
    task = TransformersTask(
        new_model(tokenizer, options.width), processing_class=tokenizer, optimizer=optimizer
    )
    trainer = Trainer(
        max_steps=options.steps,
        batch_size=16,
        max_grad_norm=1.0,
        collate=transformers.DataCollatorForSeq2Seq(tokenizer),  # pads labels with -100
        checkpoint=CheckpointConfig(every=20),
        log_every=10,
        run_dir=options.run_dir,
        strategy=options.strategy,
        devices=options.devices or "auto",
        precision=options.precision,
    )
    before = trainer.validate(task, others)["validation/loss"]
    trainer.fit(task, data, resume=options.run_dir and "auto")
    after = trainer.validate(task, others)["validation/loss"]
    print(f"nats for a token of other answers: {before:.4f} before, {after:.4f} after")
    prompt = tokenizer.apply_chat_template(texts[0][:1], add_generation_prompt=True, return_dict=True)
    speaker = TransformersTask(task.model, generate={"max_new_tokens": 32, "do_sample": False})
    written = trainer.predict(speaker, [{name: torch.tensor([each]) for name, each in prompt.items()}])[0]
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
