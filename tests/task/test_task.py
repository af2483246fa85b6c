"""The task: how it reads a batch, what it records of itself, and what it refuses."""

import copy
from collections import UserDict, namedtuple
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import NextToken, Regression, pairs, quiet, variant
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torchmetrics import SumMetric

from drivetrain import ConfigError, DataError, OptimizerConfig, StepOutput, TaskModule
from drivetrain.task.forward import call_forward
from drivetrain.task.output import without_other_graphs
from drivetrain.task.task import StepModule, overrides

ONE, TWO, THREE = torch.ones(2), torch.ones(2) * 2, torch.ones(2) * 3
Pair = namedtuple("Pair", ["image", "label"])
HELD = make_dataclass("Held", ["image", "label"])(1, 2)


class Plain(TaskModule):
    def forward(self, image: Any) -> Any:
        return image


class CalledOtherwise(Plain):
    def __call__(self, image: Any) -> Any:
        return 3 * super().__call__(image)


def task_of(base: type[TaskModule] = TaskModule, **methods: Any) -> TaskModule:
    return type("Made", (base,), methods)()


PLAIN = Plain()
NAMED = task_of(forward=lambda self, image, mask=None, *, scale=1: (image, mask, scale))
TARGETED = task_of(forward=lambda self, **columns: columns)
COLUMNS = task_of(forward=lambda self, **columns: columns)
WITH_THE_REST = task_of(forward=lambda self, image, **others: (image, others))
STARRED = task_of(forward=lambda self, *tensors: tensors)
MASKED = task_of(forward=lambda self, image, mask=None: (image, mask))
KEYWORD = task_of(forward=lambda self, image, *, mask=None: (image, mask))
QUESTION = task_of(forward=lambda self, image, question: image)
for each in (MASKED, KEYWORD, QUESTION, TARGETED):
    each.loss = nn.MSELoss()  # type: ignore[assignment]
SCORED = task_of(type(MASKED), loss=lambda self, outputs, batch: batch[0].sum())
SCORED.metrics = {"sum": SumMetric()}  # type: ignore[assignment]
FORWARDS: list[tuple[TaskModule, Any, Any]] = [
    (NAMED, {"label": TWO, "mask": THREE, "image": ONE}, (ONE, THREE, 1)),
    (NAMED, UserDict({"image": ONE, "label": TWO, "scale": 5}), (ONE, None, 5)),
    (NAMED, (ONE,), (ONE, None, 1)),
    (MASKED, (ONE, TWO), (ONE, None)),  # never the target
    (SCORED, [ONE, TWO], (ONE, None)),
    (QUESTION, (ONE, TWO), ONE),  # a prediction has no target
    (COLUMNS, {"image": ONE, "label": TWO}, {"image": ONE, "label": TWO}),
    (TARGETED, {"image": ONE, "weight": THREE, "labels": TWO}, {"image": ONE, "weight": THREE}),
    (WITH_THE_REST, {"image": ONE, "label": TWO}, (ONE, {"label": TWO})),
    (PLAIN, (ONE, TWO), ONE),
    (PLAIN, Pair(ONE, TWO), ONE),
    (PLAIN, ONE, ONE),
    (PLAIN, "a text", "a text"),
    (task_of(forward=lambda self, *, image: image), {"image": ONE}, ONE),
]


def test_forward_and_predictions_get_what_the_parameters_say() -> None:
    for task, batch, expected in FORWARDS:
        for given in (call_forward(task, task.inputs(batch)), task.predict_step(batch)):
            assert type(given) is type(expected)
            if isinstance(expected, (Tensor, str)):
                assert given is expected
            else:
                torch.testing.assert_close(given, expected, rtol=0, atol=0)
    assert STARRED.predict_step({"image": ONE}) == ()
    doubled = task_of(Plain, predict_step=lambda self, batch: 2 * batch["image"])
    renamed = task_of(Plain, inputs=lambda self, batch: batch["label"])
    for task, expected in ((doubled, 2 * ONE), (renamed, TWO), (CalledOtherwise(), 3 * ONE)):
        assert torch.equal(task.predict_step({"image": ONE, "label": TWO}), expected)


class Learning(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, image: Tensor) -> Tensor:
        return image * self.scale


def test_hooks_on_a_task_and_on_all_modules_see_its_forward() -> None:
    task, heard = Learning(), []
    for register in (task.register_forward_hook, torch_module.register_module_forward_hook):
        handle = register(lambda module, *_: heard.append(module))
        call_forward(task, {"image": ONE})
        handle.remove()
    assert heard == [task, task]


def test_a_task_that_is_compiled_or_calls_itself_otherwise_is_called() -> None:
    assert torch.equal(call_forward(CalledOtherwise(), ONE), 3 * ONE)
    task, graphs = Learning(), []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    task.compile(backend=backend)
    call_forward(task, ONE)
    assert len(graphs) == 1


def test_loss_weight_metric_inputs_and_other_defaults() -> None:
    for name in ("label", "labels", "target", "targets", "y"):
        assert PLAIN.metric_inputs(ONE, {"image": THREE, name: TWO}) == (ONE, TWO)
    assert PLAIN.metric_inputs(ONE, (THREE, THREE, TWO)) == (ONE, TWO)
    batches = {"image": torch.zeros(7, 2)}, (torch.zeros(3, 1), torch.zeros(3)), {"name": "no tensor"}
    assert [PLAIN.loss_weight(batch) for batch in batches] == [7, 3, 1]
    task = Plain()
    assert dict(task.metrics()) == {}
    assert task.tokens({"image": ONE}) == 0
    assert task.configure_optimizers() == OptimizerConfig("adamw")
    assert not overrides(task, "loss_weight")
    assert overrides(NextToken(None), "loss_weight")


def test_every_step_follows_from_forward_and_loss() -> None:
    task, batch = Regression(), next(iter(pairs()))
    right = F.mse_loss(task.line(batch[0]), batch[1])
    for step in (task.training_step, task.validation_step, task.test_step):
        output = step(batch)
        assert torch.equal(output.loss, right)
        assert torch.equal(output.outputs, task(batch[0]))
    assert torch.equal(task.predict_step(batch), task(batch[0]))
    task.training_step(batch).loss.backward()
    assert all(parameter.grad is not None for parameter in task.parameters())
    assert PLAIN.loss({"loss": ONE}, None) is PLAIN.loss(SimpleNamespace(loss=ONE), None) is ONE
    own = variant(validation_step=lambda self, batch: {"loss": torch.tensor(7.0)})
    assert quiet().test(own(), pairs()) == {"test/loss": 7.0}  # the test step follows the validation step


class Recorded(TaskModule):
    def __init__(self, hidden: int, rate: float = 0.1, *more: Any, name: str = "x", **others: Any) -> None:
        super().__init__()
        self.line = nn.Linear(hidden, 1)


class Narrow(Recorded):  # its own arguments count, not what it passes on
    def __init__(self, width: int = 3) -> None:
        super().__init__(width * 2, 0.5, other=1)


class Popping(TaskModule):  # changes its arguments
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        options["names"].append("c")


def test_hparams_are_the_constructor_arguments_as_they_were_given() -> None:
    assert Recorded(2).hparams == {"hidden": 2, "rate": 0.1, "more": (), "name": "x"}
    given = {"hidden": 2, "rate": 0.5, "more": ("a", "b"), "name": "y", "depth": 3}
    assert Recorded(2, 0.5, "a", "b", name="y", depth=3).hparams == given
    assert Narrow().hparams == {"width": 3}
    assert Popping({"names": ["a"]}).hparams == {"options": {"names": ["a"]}}


class Assigned(TaskModule):  # a module in place of `loss`, metrics in place of `metrics`
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 2)
        self.loss: Any = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))
        self.metrics: Any = {"kept": Kept()}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Kept(SumMetric):
    def update(self, outputs: Tensor, target: Tensor) -> None:
        super().update(target.sum())


def test_a_module_is_the_loss_and_a_mapping_the_metrics_where_the_class_defines_none() -> None:
    task, x, y = Assigned(), torch.ones(3, 1), torch.tensor([0, 1, 1])
    expected = F.cross_entropy(task(x), y, torch.tensor([1.0, 3.0]))
    for found in (task.training_step({"x": x, "y": y}).loss, task.training_step((x, y)).loss):
        assert torch.equal(found, expected)
    assert torch.equal(task.loss(task(x), y), expected)  # as a step of the user's calls it
    assert task.double().state_dict()["loss.weight"].dtype is torch.float64
    assert [name for name, _ in copy.deepcopy(task).named_children()] == ["net", "loss"]
    data = [{"x": x, "y": y}] * 4
    for options in ({}, {"compile": {"backend": "eager"}}):
        values = quiet(max_epochs=1, **options).fit(Assigned(), data, data).metrics
        assert (values["validation/kept"], values["validation/loss"] > 0) == (8.0, True)


def test_refusals_of_a_task() -> None:
    class Without(Plain):
        def __init__(self) -> None:
            pass

    def hide(task: TaskModule, name: str, value: Any) -> tuple[Any, ...]:
        kind = type(task).__name__
        return lambda: setattr(task, name, value), f"{kind}.{name} is a method", f"'{name}_function'"

    def loss(outputs: Any) -> tuple[Any, ...]:
        return lambda: PLAIN.loss(outputs, None), "Plain has no loss", "`loss(self, outputs, batch)`"

    images = {"images": ONE, "label": TWO}
    cases: dict[str, tuple[Any, ...]] = {
        "a column": (lambda: PLAIN.inputs(images), "'image'", "'images', 'label'", "Rename"),
        "too short": (lambda: QUESTION.inputs([ONE]), "(image, question)", "sequence of 1: (float32[2])"),
        "the target": (lambda: QUESTION.training_step((ONE, TWO)), "takes all of them (image, question)"),
        "a mask or not": (lambda: MASKED.inputs((ONE, THREE, TWO)), "return batch[0], batch[1]`"),
        "by keyword": (lambda: KEYWORD.inputs((ONE, THREE, TWO)), "(image, *, mask=None)", "batch[1]`"),
        "more": (lambda: NAMED.inputs((ONE, TWO)), "(image, mask=None, *, scale=1)", "return batch[0]`"),
        "a star": (lambda: STARRED.inputs((ONE,)), "Made.forward(*tensors)", "def inputs(self, batch)"),
        "by name alone": (lambda: COLUMNS.inputs([ONE]), "(there is none)", "mappings"),
        "a data class": (lambda: PLAIN.inputs(HELD), "data class Held, and not its field 'image'"),
        "no target": (lambda: PLAIN.metric_inputs(ONE, {"lable": TWO}), "'lable'", "none of 'label'"),
        "a tensor": (lambda: PLAIN.metric_inputs(ONE, ONE), "a Tensor", "metric_inputs"),
        "no constructor": (lambda: Without().predict_step({"image": ONE}), "Without"),
        "no loss of a tensor": loss(ONE),
        "a module beside a method": hide(Regression(), "loss", nn.MSELoss()),
        "a function": (*hide(Plain(), "loss", F.mse_loss), "Assign a module", "or define loss("),
        "a list of metrics": (*hide(Plain(), "metrics", []), "`self.metrics = {"),
    }
    assert_refused((ConfigError, DataError, AttributeError, TypeError), cases)
    task = Plain()  # names that are near are free
    task.loss_function = nn.CrossEntropyLoss()
    task.metric = 3
    assert [name for name, _ in task.named_children()] == ["loss_function"]


def test_step_module_runs_what_it_is_told_inside_its_context_and_owns_the_task_once() -> None:
    task = Regression()
    module, (features, target) = StepModule(task), next(iter(pairs()))
    assert torch.equal(module(features), task(features))
    module.use(task.training_step)
    assert torch.equal(module((features, target)).loss, task.training_step((features, target)).loss)
    assert [name for name, _ in module.named_children()] == ["task"]
    assert sorted(module.state_dict()) == sorted(f"task.{name}" for name in task.state_dict())
    looking = task_of(forward=lambda self, image: torch.is_autocast_enabled("cpu"))
    found = [StepModule(looking)(ONE), StepModule(looking, lambda: torch.autocast("cpu"))(ONE)]
    assert found == [False, True]


def step(batch: Tensor) -> StepOutput:
    outputs = {"scores": batch * 2, "names": ["a"]}
    return StepOutput(outputs["scores"].sum(), outputs, {"size": 3.0} if batch.numel() > 1 else None)


def test_outputs_of_a_step_have_no_graph_or_are_dropped() -> None:
    batch = torch.ones(2, requires_grad=True)
    found = without_other_graphs(step, keep_outputs=True)(batch)
    assert found.loss.requires_grad
    assert not found.outputs["scores"].requires_grad
    assert torch.equal(found.outputs["scores"], batch.detach() * 2)
    assert (found.outputs["names"], found.metrics) == (["a"], {"size": 3.0})
    drop = without_other_graphs(step, keep_outputs=False)
    assert (drop(batch).outputs, drop(batch).metrics) == (None, {"size": 3.0})
    assert drop(torch.ones(1, requires_grad=True)).requires_grad  # the loss alone
