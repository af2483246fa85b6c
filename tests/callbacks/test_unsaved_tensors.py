"""Tensors that steps need and no checkpoint holds are named by a warning, no others; generators go on."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import FEATURES, Regression, pairs, quiet, variant
from torch import Tensor, nn
from torchmetrics import MeanMetric

from drivetrain import CheckpointConfig, CompileConfig, LambdaCallback, rank


def told(task: Regression, run_dir: Path, every: str = "1 epoch", **options: Any) -> list[str]:
    """The warnings of a fit of two epochs, of five steps each."""
    policy, resume = CheckpointConfig(every=every, by=None), options.pop("resume", None)
    options = {"max_epochs": 2, "checkpoint": policy, "run_dir": run_dir, **options}
    with heard() as caught:
        quiet(**options).fit(task, pairs(10), pairs(4), resume=resume)
    return [each for each in caught if "that no checkpoint holds" in each]


Encoder = type("Encoder", (nn.Module,), {})  # a module of the user's


class Recurrent(Regression):  # an LSTM whose state goes on from batch to batch
    def __init__(self) -> None:
        super().__init__()
        self.encoder: Any = Encoder()
        self.encoder.lstm, self.encoder.hidden = nn.LSTM(FEATURES, FEATURES), None

    def forward(self, features: Tensor) -> Tensor:
        out, hidden = self.encoder.lstm(features, self.encoder.hidden)
        self.encoder.hidden = tuple(each.detach() for each in hidden)
        return super().forward(out)


class Touched(Regression):  # does something with itself in each forward
    def __init__(self, touch: Any) -> None:
        super().__init__()
        self.touch, self.calls = touch, 0

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        self.touch(self)
        return super().forward(features)


def test_hidden_state_of_an_lstm_is_named_once_in_each_fit_with_what_to_do(tmp_path: Path) -> None:
    for epochs in (1, 2):  # the second one is resumed
        (text,) = told(Recurrent(), tmp_path, max_epochs=epochs, resume="auto")
        assert "'encoder.hidden' of Recurrent" in text
        assert re.search("register_buffer.*get_extra_state.*state_dict", text)
    assert told(Recurrent(), tmp_path, checkpoint=False) == []


def test_what_a_step_reads_from_an_earlier_one_is_named_however_it_is_kept(tmp_path: Path) -> None:
    for name, touch, begin in (
        ("replace", lambda task: setattr(task, "kept", task.kept * task.calls), torch.ones(2)),
        ("add", lambda task: task.kept.add_(1), torch.zeros(2)),
        ("part", lambda task: (task.kept[:1].fill_(task.calls), task.kept.sum()), torch.zeros(2)),
        ("append", lambda task: (task.kept.append(torch.zeros(1)), sum(task.kept)), [torch.zeros(1)]),
        ("average", lambda task: task.kept["mean"].lerp_(torch.ones(1), 0.1), {"mean": torch.zeros(1)}),
        ("array", lambda task: task.kept.__iadd__(1), np.zeros(2)),
    ):
        task = Touched(touch)
        task.kept = begin
        (text,) = told(task, tmp_path / name, max_epochs=1)
        assert text.startswith("training changes tensors that no checkpoint holds: 'kept' of Touched."), name


def test_what_a_step_only_leaves_or_writes_before_it_reads_is_not_named(tmp_path: Path) -> None:
    def part(task: Any) -> None:
        task.kept[: task.calls] = 1.0
        task.line.weight.sum() + task.kept[: task.calls].sum()

    def grow(task: Any) -> None:  # as a cache of rotary embeddings
        if len(task.kept) < task.calls:
            task.kept = torch.arange(float(task.calls))
        task.kept.sum()

    for name, touch, begin in (
        ("loss", lambda task: setattr(task, "kept", task.line.weight.sum()), None),
        ("record", lambda task: setattr(task, "kept", torch.zeros(2) + task.calls), None),
        ("log", lambda task: task.kept.append(torch.zeros(1)), []),
        ("scratch", lambda task: task.kept.copy_(torch.ones(2) * task.calls).sum(), torch.zeros(2)),
        ("out", lambda task: torch.add(torch.ones(2), task.calls, out=task.kept).sum(), torch.zeros(2)),
        ("part", part, torch.zeros(20)),
        ("grow", grow, torch.arange(2.0)),
    ):
        task = Touched(touch)
        task.kept = begin
        assert told(task, tmp_path / name, every="2 steps", max_epochs=1) == [], name


def test_a_tensor_that_a_callback_changes_is_named(tmp_path: Path) -> None:
    task = Touched(lambda task: None)
    task.teacher = {"weight": torch.zeros(2)}
    average = LambdaCallback(on_step_end=lambda run: run.task.teacher["weight"].add_(1))
    assert len(told(task, tmp_path, callbacks=[average])) == 1


def test_random_generators_of_a_task_go_on_after_a_resume(tmp_path: Path) -> None:
    class Noisy(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.noise, self.others = torch.Generator(), [random.Random(1), np.random.default_rng(2)]
            self.named, self.drawn = {"numpy": np.random.RandomState(3)}, list[Any]()

        def forward(self, features: Tensor) -> Tensor:
            some = torch.rand(1, generator=self.noise).item(), self.others[0].random()
            self.drawn.append((*some, self.others[1].normal(), self.named["numpy"].normal()))
            return super().forward(features)

    whole, first, second = Noisy(), Noisy(), Noisy()
    for task, where, epochs in ((whole, "whole", 2), (first, "parts", 1), (second, "parts", 2)):
        assert told(task, tmp_path / where, max_epochs=epochs, resume="auto", seed=1) == []
    assert len(whole.drawn) > len(first.drawn)
    assert whole.drawn == first.drawn + second.drawn


class Drawing(Regression):
    """Draws from a generator of its own, which differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(rank())

    @torch.compiler.disable
    def draw(self) -> Tensor:
        return torch.rand(1, generator=self.noise)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features + self.draw())


def drawn_in_two_parts(folder: Path, **options: Any) -> None:
    """Compare a fit with one that stops in its first epoch, which makes one validation more."""
    found = []
    for where, last in (("whole", None), ("parts", 1), ("parts", None)):
        task = Drawing()
        stop = LambdaCallback(on_step_end=lambda run, last=last: run.stop("") if last else None)
        settings = {"max_epochs": 2, "checkpoint": True, "run_dir": folder / where, "callbacks": [stop]}
        quiet(**settings, **options).fit(task, pairs(8), pairs(4), resume="auto")
        found.append([task.line.weight.tolist(), task.noise.get_state().tolist()])
    assert found[0] == found[2] != found[1]


def test_each_rank_goes_on_with_its_own_generator_and_so_does_a_compiled_task(tmp_path: Path) -> None:
    on_two_ranks(lambda: drawn_in_two_parts(tmp_path / "ranks", strategy="ddp", devices=2))
    drawn_in_two_parts(tmp_path / "compiled", compile=CompileConfig(backend="eager"))


def test_caches_buffers_views_of_weights_and_numbers_are_not_named(tmp_path: Path) -> None:
    def mask(task: Any) -> None:
        if task.calls == 1:
            task.mask, task.by_length = torch.ones(3, 3).triu(), {}
        task.by_length.setdefault(task.calls, torch.zeros(task.calls))

    def change_buffers(task: Any) -> None:
        if task.calls == 1:
            task.register_buffer("kept", torch.zeros(2))
            task.register_buffer("written", torch.zeros(2), persistent=False)
            task.alias = [task.kept]
        task.kept += 1
        task.written.copy_(torch.arange(2))  # as strategies do that give all ranks the buffers of rank 0

    def look(task: Any) -> None:
        task.view, task.detached = task.line.weight[:, :2], [task.line.weight.detach()]
        task.weights, task.seen, task.words = [task.line.weight], task.calls, [str(task.calls)]

    for touch in (mask, look, change_buffers):
        assert told(Touched(touch), tmp_path / touch.__name__, every="2 steps") == [], touch.__name__


class Average:  # of the user's, and no module
    def __init__(self, module: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in module.named_parameters()}

    def add(self, module: nn.Module) -> None:
        for name, each in module.named_parameters():
            self.shadow[name].lerp_(each.detach(), 0.1)


def test_buffers_objects_and_hidden_modules_are_named_where_the_checkpoint_lacks_them(tmp_path: Path) -> None:
    class Lacking(Touched):
        def __init__(self) -> None:
            super().__init__(lambda task: task.add())
            self.line.register_buffer("mean", torch.zeros(2), persistent=False)
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("dropped", torch.zeros(2))
            self.register_state_dict_post_hook(
                lambda module, state, prefix, _: (
                    [state.pop(prefix + each) for each in ("scale", "dropped")] and None
                )
            )
            self.average, self.hidden, self.unused = Average(self.line), [nn.Linear(2, 2)], Average(self.line)
            self.stored, self.left_out = torch.zeros(2), torch.zeros(2)
            self.numbers = torch.zeros(2)

        def add(self) -> None:
            self.average.add(self.line)
            states = (
                self.line.mean,
                self.hidden[0].bias,
                self.stored,
                self.left_out,
                self.numbers,
                self.dropped,
            )
            with torch.no_grad():
                for number, each in enumerate(states, 1):
                    each += self.calls * number

        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features) * self.scale

        def get_extra_state(self) -> Any:
            return {"stored": self.stored.clone(), "numbers": self.numbers.tolist()}

    (text,) = told(Lacking(), tmp_path, max_epochs=1)
    named = set(re.findall("'([a-z._]+)'", text.partition(" of Lacking")[0]))
    assert named == {"line.mean", "average", "hidden", "left_out", "scale", "dropped"}


class WithExtra(Recurrent):
    def get_extra_state(self) -> Any:
        return {"hidden": self.encoder.hidden}


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_metrics_extra_states_and_what_torch_computes_are_not_named(tmp_path: Path) -> None:
    def inputs(self: Any, outputs: Tensor, batch: Any) -> tuple[Any, ...]:
        self.other.update(outputs.detach())
        return (outputs,)

    measured = variant(metrics=lambda self: {"mean": self.mean}, metric_inputs=inputs)()
    measured.mean, measured.other = MeanMetric(), MeanMetric()  # a declared one, and another
    normed = Regression()
    nn.utils.parametrizations.weight_norm(normed.line)  # the weight is a plain attribute
    for number, task in enumerate((Regression(), measured, WithExtra(), normed)):
        assert told(task, tmp_path / str(number)) == [], number


def on_ranks(run_dir: Path) -> tuple[int, int]:
    chosen: dict[str, Any] = {"strategy": "fsdp", "devices": 2}
    return len(told(Regression(), run_dir / "sound", **chosen)), len(told(Recurrent(), run_dir, **chosen))


def test_of_several_ranks_the_first_one_warns(tmp_path: Path) -> None:
    assert on_two_ranks(on_ranks, tmp_path) == [(0, 1), (0, 0)]
