"""The kinds of work of docs/how-to/kinds as loops of plain torch.

Each function trains the task of its page, with an optimizer, a loss and a step written by hand, and yields
the losses. A nightly test compares them with those of the page's fit to a millionth.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

Losses = Iterator[float]


def stepped(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def decayed(module: nn.Module, decay: float) -> list[dict[str, Any]]:  # matrices and kernels alone
    parameters = list(module.parameters())
    matrices, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def warm_line(warmup: int, total: int, step: int) -> float:
    return (step + 1) / (warmup + 1) if step < warmup else (total - step) / (total - warmup)


def warm_cosine(warmup: int, total: int, step: int) -> float:
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2


def images(task: Any, batches: Any) -> Losses:
    net = task.net
    sgd = torch.optim.SGD(decayed(net, 5e-4), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    schedule = LambdaLR(sgd, lambda step: warm_cosine(9, 88, step))
    for batch in batches:
        image, label = batch["image"], batch["label"]
        share = torch.distributions.Beta(0.2, 0.2).sample()
        other = torch.randperm(len(label))
        scores = net(share * image + (1 - share) * image[other])
        losses = [F.cross_entropy(scores, each, label_smoothing=0.1) for each in (label, label[other])]
        yield stepped(share * losses[0] + (1 - share) * losses[1], sgd)
        schedule.step()


def recommender(task: Any, batches: Any) -> Losses:
    users, items, head = task.tables["user"], task.tables["item"], task.head
    sparse = torch.optim.SparseAdam([users.weight, items.weight], lr=1e-2)
    adamw = torch.optim.AdamW(decayed(head, 0.01), lr=2e-3, fused=True)
    for batch in batches:
        user = users(batch["user"])
        scores = []
        for item in (batch["item"], torch.randint_like(batch["item"], 300)):
            item = items(item)
            scores.append((user * item).sum(-1) + head(torch.cat([user, item, user * item], -1)).squeeze(-1))
        yield stepped(-F.logsigmoid(scores[0] - scores[1]).mean(), sparse, adamw)


def gan(task: Any, batches: Any) -> Losses:
    generator, critic = task.generator, task.critic
    of_critic, of_generator = (
        torch.optim.Adam(each.parameters(), lr=2e-3, betas=(0.0, 0.9), fused=True)
        for each in (critic, generator)
    )
    for real in batches:
        for _ in range(3):
            fake = generator(torch.randn(len(real), 4)).detach()
            distance = critic(real).mean() - critic(fake).mean()
            share = torch.rand(len(real), 1)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            yield stepped((slope.norm(dim=1) - 1).square().mean() - distance, of_critic)
        yield stepped(-critic(generator(torch.randn(len(real), 4))).mean(), of_generator)


def diffusion(task: Any, batches: Any) -> Losses:
    adamw = torch.optim.AdamW(task.parameters(), lr=3e-3, weight_decay=0.0, fused=True)
    for image, label in batches:
        level = torch.randint(50, (len(image),))
        noise = torch.randn_like(image)
        angle = torch.linspace(0.02, 0.98, 50)[level, None] * math.pi / 2
        yield stepped(F.mse_loss(task(angle.cos() * image + angle.sin() * noise, level, label), image), adamw)


def contrastive(task: Any, batches: Any) -> Losses:
    adamw = torch.optim.AdamW(decayed(task, 1e-2), lr=2e-3, fused=True)
    schedule = LambdaLR(adamw, lambda step: warm_cosine(10, 80, step))
    for image in batches:
        first, second = (F.normalize(task.projector(task.encoder(task.view(image)))) for _ in range(2))
        positive = (first * second).sum(dim=1) / 0.2
        yield stepped(((first @ second.T / 0.2).logsumexp(dim=1) - positive).mean(), adamw)
        schedule.step()


def reinforcement_learning(task: Any, batches: Any) -> Losses:
    online, target = task.online, task.target
    adam = torch.optim.Adam(online.parameters(), lr=2e-3, fused=True)
    for number, batch in enumerate(batches):
        if number % 20 == 0:
            target.load_state_dict(online.state_dict())
        before, after = (F.one_hot(batch[name], 5).flatten(1).float() for name in ("place", "next"))
        with torch.no_grad():
            rows = torch.arange(len(after))
            wanted = batch["reward"] + 0.95 * ~batch["done"] * target(after)[rows, online(after).argmax(1)]
        adam.zero_grad()
        loss = F.smooth_l1_loss(online(before)[torch.arange(len(before)), batch["action"]], wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        adam.step()
        yield loss.item()


def time_series(task: Any, batches: Any) -> Losses:
    adamw = torch.optim.AdamW(task.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    schedule = LambdaLR(adamw, lambda step: warm_cosine(5, 80, step))
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    for batch in batches:
        error = batch["values"][:, 8:, None] - task(batch["values"])[:, 7:-1]
        error = error[batch["real"][:, 8:]]
        loss = torch.maximum(quantiles * error, (quantiles - 1) * error).mean()
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        adamw.step()
        schedule.step()
        yield loss.item()


def texts(task: Any, batches: Any) -> Losses:
    adamw = torch.optim.AdamW(decayed(task, 0.01), lr=3e-3, fused=True)
    schedule = LambdaLR(adamw, lambda step: warm_line(10, 150, step))
    for batch in batches:
        loss = F.cross_entropy(task(batch["text"]), batch["label"])
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        adamw.step()
        schedule.step()
        yield loss.item()


def segmentation(task: Any, batches: Any) -> Losses:
    adamw = torch.optim.AdamW(decayed(task, 1e-4), lr=1e-2, fused=True)
    schedule = LambdaLR(adamw, lambda step: warm_cosine(0, 80, step))
    for batch in batches:
        scores, mask = task(batch["image"]), batch["mask"]
        pixel = F.binary_cross_entropy_with_logits(
            scores[mask != 255], mask[mask != 255].float(), reduction="none"
        )
        focal = ((1 - (-pixel).exp()) ** 2 * pixel).mean()
        share, is_disc = scores.sigmoid() * (mask != 255), (mask == 1).float()
        both = (share * is_disc).sum((1, 2))
        dice = 1 - (2 * both + 1) / (share.sum((1, 2)) + is_disc.sum((1, 2)) + 1)
        yield stepped(focal + (dice * (mask != 255).sum((1, 2))).sum() / (mask != 255).sum(), adamw)
        schedule.step()


def graphs(task: Any, batches: Any) -> Losses:
    adamw = torch.optim.AdamW(decayed(task, 1e-3), lr=3e-3, fused=True)
    for batch in batches:
        outputs = task(batch["mark"], batch["edges"], batch["graph"])
        yield stepped((outputs - batch["target"]).square().mean(), adamw)


def tables(task: Any, batches: Any) -> Losses:
    adamw = torch.optim.AdamW(decayed(task, 0.05), lr=5e-3, fused=True)
    task.train()
    for batch in batches:
        yield stepped(F.cross_entropy(task(batch["numbers"], batch["group"]), batch["label"]), adamw)


def distill(task: Any, batches: Any) -> Losses:  # from the teacher's outputs as a column
    adamw = torch.optim.AdamW(task.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for batch in batches:
        learnt, taught = task.net(batch["x"]).log_softmax(-1), batch["taught"].log_softmax(-1)
        yield stepped(F.kl_div(learnt, taught, log_target=True, reduction="batchmean"), adamw)


def language_model(task: Any, batches: Any) -> Losses:  # in bfloat16, two micro-batches for a step
    adamw = torch.optim.AdamW(decayed(task, 0.1), lr=3e-3, betas=(0.9, 0.95), fused=True)
    schedule = LambdaLR(adamw, lambda step: 0.1 + 0.9 * warm_cosine(1, 16, step) if step else 0.5)
    for pair in zip(batches, batches, strict=True):
        tokens = sum(batch["targets"].numel() for batch in pair)
        adamw.zero_grad()
        for batch in pair:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = task(batch["tokens"])
                loss = F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())
            (loss * batch["targets"].numel() / tokens).backward()
            yield loss.item()
        nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        adamw.step()
        schedule.step()
