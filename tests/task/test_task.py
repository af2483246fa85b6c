"""The task: how it reads a batch, what it records of itself, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
import torch
from tests.support.tasks import NextToken, Regression, pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from drivetrain import ConfigError, DataError, OptimizerConfig, StepOutput, TaskModule
from drivetrain.task.forward import call_forward
from drivetrain.task.task import StepModule

ONE, TWO, THREE = torch.ones(2), torch.ones(2) * 2, torch.ones(2) * 3
Pair = namedtuple("Pair", ["image", "label"])


class Named(TaskModule):
    def forward(self, image: Any, mask: Any = None, *, scale: Any = 1) -> Any:
        return image, mask, scale


class Everything(TaskModule):
    def forward(self, **columns: Any) -> Any:
        return columns


class OneOfAll(TaskModule):
    def forward(self, image: Any, **others: Any) -> Any:
        return image


class Starred(TaskModule):
    def forward(self, *tensors: Any) -> Any:
        return tensors


class Plain(TaskModule):
    def forward(self, image: Any) -> Any:
        return image


class Learning(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.heard = False

    def forward(self, image: Tensor) -> Tensor:
        return image * self.scale


# What forward gets.


@pytest.mark.parametrize(
    ("task", "batch", "expected"),
    [
        (Named(), {"image": ONE, "label": TWO}, (ONE, None, 1)),
        (Named(), {"label": TWO, "mask": THREE, "image": ONE}, (ONE, THREE, 1)),
        (Named(), {"image": ONE, "scale": 5}, (ONE, None, 5)),
        (Named(), UserDict({"image": ONE, "label": TWO}), (ONE, None, 1)),
        (Everything(), {"image": ONE, "label": TWO}, {"image": ONE, "label": TWO}),
        (Everything(), UserDict({"image": ONE}), {"image": ONE}),
        (Named(), (ONE, TWO, THREE), (ONE, TWO, 1)),
        (Plain(), (ONE, TWO), ONE),
        (Plain(), [ONE, TWO], ONE),
        (Plain(), [ONE], ONE),
        (Plain(), Pair(ONE, TWO), ONE),
        (Starred(), (ONE, TWO, THREE), (ONE, TWO, THREE)),
        (Plain(), ONE, ONE),
        (Plain(), "a text", "a text"),
    ],
)
def test_forward_gets_what_its_parameters_say(task: TaskModule, batch: Any, expected: Any) -> None:
    given = call_forward(task, task.inputs(batch))
    assert type(given) is type(expected)
    if isinstance(expected, Mapping):
        assert given == expected
    elif isinstance(expected, tuple):
        assert len(given) == len(expected)
        assert all(mine is right for mine, right in zip(given, expected, strict=True))
    else:
        assert given is expected


def global_hook(registered: Any) -> Callable[[nn.Module], Any]:
    return lambda task: registered(lambda module, *_: heard(task) if module is task else None)


def own_hook(name: str) -> Callable[[nn.Module], Any]:
    return lambda task: getattr(task, name)(lambda *_: heard(task))


def heard(task: Any) -> None:
    task.heard = True


REGISTER = [
    own_hook("register_forward_pre_hook"),
    own_hook("register_forward_hook"),
    own_hook("register_full_backward_hook"),
    own_hook("register_full_backward_pre_hook"),
    global_hook(torch_module.register_module_forward_pre_hook),
    global_hook(torch_module.register_module_forward_hook),
    global_hook(torch_module.register_module_full_backward_hook),
    global_hook(torch_module.register_module_full_backward_pre_hook),
]


@pytest.mark.parametrize("register", REGISTER)
@pytest.mark.parametrize("inputs", [{"image": ONE}, (ONE,), UserDict({"image": ONE}), ONE])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # as no input has a gradient
def test_hooks_on_a_task_see_its_forward(register: Callable[[nn.Module], Any], inputs: Any) -> None:
    task = Learning()
    handle = register(task)
    try:
        call_forward(task, inputs).sum().backward()
    finally:
        handle.remove()
    assert task.heard


def test_a_task_that_is_compiled_or_calls_itself_otherwise_is_called() -> None:
    class Doubling(Plain):
        def __call__(self, image: Any) -> Any:
            return 2 * super().__call__(image)

    class Tripling(Plain):
        def _call_impl(self, *inputs: Any, **named: Any) -> Any:
            return 3 * super()._call_impl(*inputs, **named)

    assert torch.equal(call_forward(Doubling(), ONE), 2 * ONE)
    assert torch.equal(call_forward(Tripling(), ONE), 3 * ONE)
    task, graphs = Learning(), []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    task.compile(backend=backend)
    call_forward(task, ONE)
    assert len(graphs) == 1


# Many predictions.


class Both(TaskModule):
    def forward(self, image: Any, mask: Any) -> Any:
        return image, mask


class WithTheRest(TaskModule):
    def forward(self, image: Any, **others: Any) -> Any:
        return image, others


class Doubled(Plain):
    def predict_step(self, batch: Any) -> Any:
        return 2 * batch["image"]


class Renamed(Plain):
    def inputs(self, batch: Any) -> Any:
        return batch["label"]


class CalledOtherwise(Plain):
    def __call__(self, image: Any) -> Any:
        return 3 * super().__call__(image)


def by_name_only(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def called(self: Any, **columns: Any) -> Any:
        return forward(self, **columns)

    return called


class Decorated(TaskModule):
    @by_name_only
    def forward(self, image: Any) -> Any:
        return image


class ByNameOnly(TaskModule):
    def forward(self, *, image: Any) -> Any:
        return image


@pytest.mark.parametrize(
    ("task", "batch", "expected"),
    [
        (Plain(), {"label": TWO, "image": ONE}, ONE),
        (Plain(), (ONE, TWO), ONE),
        (Plain(), UserDict({"image": ONE}), ONE),
        (Plain(), ONE, ONE),
        (Both(), {"mask": TWO, "label": THREE, "image": ONE}, (ONE, TWO)),
        (Named(), {"image": ONE, "scale": 5}, (ONE, None, 5)),
        (Everything(), {"image": ONE}, {"image": ONE}),
        (Starred(), {"image": ONE}, ()),
        (WithTheRest(), {"image": ONE, "label": TWO}, (ONE, {"label": TWO})),
        (ByNameOnly(), {"image": ONE}, ONE),
        (Decorated(), {"image": ONE}, ONE),
        (Doubled(), {"image": ONE}, 2 * ONE),
        (Renamed(), {"image": ONE, "label": TWO}, TWO),
        (CalledOtherwise(), {"image": ONE}, 3 * ONE),
    ],
)
def test_a_prediction_is_what_forward_gives(task: TaskModule, batch: Any, expected: Any) -> None:
    torch.testing.assert_close(task.predict_step(batch), expected, rtol=0, atol=0)


def test_a_task_without_its_constructor_says_so() -> None:
    class Without(Plain):
        def __init__(self) -> None:
            pass

    with pytest.raises(AttributeError, match="Without"):
        Without().predict_step({"image": ONE})


# What is wrong with a batch.


def test_a_missing_column_is_an_error_that_lists_the_batchs_columns() -> None:
    with pytest.raises(
        DataError,
        match=r"Plain.forward has a parameter 'image', but the batch has no such column. "
        r"Did you mean 'images'\? The batch has: 'images', 'label'. Rename the parameter or the column",
    ):
        Plain().inputs({"images": ONE, "label": TWO})


def test_a_forward_that_takes_all_columns_may_still_lack_one() -> None:
    assert call_forward(OneOfAll(), OneOfAll().inputs({"image": ONE, "label": TWO})) is ONE
    with pytest.raises(DataError, match="has a parameter 'image', but the batch has no such column"):
        OneOfAll().inputs({"label": TWO})


def test_columns_need_not_be_named_by_texts() -> None:
    with pytest.raises(DataError, match="The batch has: '0', '1'"):
        Plain().inputs({0: ONE, 1: TWO})


def test_a_sequence_that_is_too_short_is_an_error_that_names_the_inputs() -> None:
    class Two(TaskModule):
        def forward(self, image: Any, question: Any) -> Any: ...

    with pytest.raises(
        DataError, match=r"needs 2 inputs \(image, question\), but the batch is a sequence of 1"
    ):
        Two().inputs([ONE])


def test_inputs_may_be_overridden_to_give_anything() -> None:
    class Own(Plain):
        def inputs(self, batch: Any) -> Any:
            return {"image": batch.picture}

    @dataclass
    class Shot:
        picture: Tensor

    assert Own().predict_step(Shot(ONE)) is ONE
    assert Plain().predict_step(shot := Shot(TWO)) is shot


# What metrics get, and what the loss is a mean over.


@pytest.mark.parametrize("name", ["label", "labels", "target", "targets", "y"])
def test_metrics_get_the_outputs_and_the_target(name: str) -> None:
    assert Plain().metric_inputs(ONE, {"image": THREE, name: TWO}) == (ONE, TWO)
    assert Plain().metric_inputs(ONE, UserDict({name: TWO})) == (ONE, TWO)


def test_the_first_of_several_target_columns_is_taken() -> None:
    assert Plain().metric_inputs(ONE, {"y": THREE, "label": TWO}) == (ONE, TWO)


def test_the_target_of_a_sequence_is_its_last_item() -> None:
    assert Plain().metric_inputs(ONE, (THREE, THREE, TWO)) == (ONE, TWO)
    assert Plain().metric_inputs(ONE, [THREE, TWO]) == (ONE, TWO)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"image": ONE, "lable": TWO}, "the batch's columns are 'image', 'lable', none of 'label', 'labels'"),
        (ONE, "the batch is a Tensor. Override `metric_inputs"),
    ],
)
def test_a_batch_without_a_target_is_an_error_that_says_so(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Plain().metric_inputs(ONE, batch)


@pytest.mark.parametrize(
    ("batch", "weight"),
    [
        ({"image": torch.zeros(7, 2)}, 7),
        ((torch.zeros(3, 1), torch.zeros(3)), 3),
        (torch.zeros(0, 4), 0),
        ({"name": "no tensor"}, 1),
    ],
)
def test_a_loss_is_a_mean_over_the_samples_unless_the_task_says_otherwise(batch: Any, weight: int) -> None:
    assert Plain().loss_weight(batch) == weight


# The steps.


def test_every_step_follows_from_forward_and_loss() -> None:
    task, batch = Regression(), next(iter(pairs()))
    right = F.mse_loss(task.line(batch[0]), batch[1])
    for step in (task.training_step, task.validation_step, task.test_step):
        output = step(batch)
        assert isinstance(output, StepOutput)
        assert torch.equal(output.loss, right)
        assert torch.equal(output.outputs, task(batch[0]))
    assert torch.equal(task.predict_step(batch), task(batch[0]))


def test_a_step_needs_no_trainer_and_its_loss_has_a_gradient() -> None:
    task = Regression()
    task.training_step(next(iter(pairs()))).loss.backward()
    assert all(parameter.grad is not None for parameter in task.parameters())


def test_the_test_step_follows_the_validation_step() -> None:
    class Own(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": torch.tensor(7.0)}

    assert quiet().test(Own(), pairs()) == {"test/loss": 7.0}


def test_a_model_that_returns_its_own_loss_needs_no_other() -> None:
    class Output(dict[str, Tensor]):
        pass

    assert Plain().loss({"loss": ONE}, None) is ONE
    assert Plain().loss(Output(loss=TWO), None) is TWO

    @dataclass
    class Returned:
        loss: Tensor

    assert Plain().loss(Returned(ONE), None) is ONE


@pytest.mark.parametrize("outputs", [ONE, {"logits": ONE}, {"loss": 1.0}, None])
def test_a_task_without_a_loss_is_told_what_to_define(outputs: Any) -> None:
    with pytest.raises(ConfigError, match=r"Plain has no loss: define `loss\(self, outputs, batch\)`"):
        Plain().loss(outputs, None)


def test_the_defaults_are_no_metrics_no_tokens_and_adamw() -> None:
    task = Plain()
    assert dict(task.metrics()) == {}
    assert task.tokens({"image": ONE}) == 0
    assert task.configure_optimizers() == OptimizerConfig("adamw")
    assert not task.overrides("loss_weight")
    assert NextToken(None).overrides("loss_weight")


# What a task records of itself.


class Recorded(TaskModule):
    def __init__(self, hidden: int, rate: float = 0.1, *more: Any, name: str = "x", **others: Any) -> None:
        super().__init__()
        self.line = nn.Linear(hidden, 1)


class Narrow(Recorded):
    """Its own arguments count, not what it passes on."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(width * 2, 0.5, other=1)


class Inheriting(Recorded):
    pass


def test_constructor_arguments_are_recorded_with_their_defaults() -> None:
    assert Recorded(2).hparams == {"hidden": 2, "rate": 0.1, "more": (), "name": "x"}
    assert Recorded(2, 0.5, "a", "b", name="y", depth=3).hparams == {
        "hidden": 2,
        "rate": 0.5,
        "more": ("a", "b"),
        "name": "y",
        "depth": 3,
    }


def test_arguments_are_recorded_as_they_were_given() -> None:
    class Popping(TaskModule):
        def __init__(self, sizes: list[int], options: dict[str, Any]) -> None:
            super().__init__()
            sizes.pop()
            options["names"].append("c")

    assert Popping([1, 2], {"names": ["a"]}).hparams == {"sizes": [1, 2], "options": {"names": ["a"]}}
    module = nn.Linear(1, 1)
    assert Popping([module, 2], {"names": []}).hparams["sizes"][0] is module


def test_a_subclass_records_its_own_arguments() -> None:
    assert Narrow().hparams == {"width": 3}
    assert Inheriting(4).hparams == {"hidden": 4, "rate": 0.1, "more": (), "name": "x"}
    assert Plain().hparams == {}


@pytest.mark.parametrize("task", [Recorded(3, name="z"), Narrow(2)], ids=["required", "defaults"])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
def test_a_copy_is_the_same_task(task: TaskModule, again: Any) -> None:
    twin = again(task)
    assert type(twin) is type(task)
    assert twin.hparams == task.hparams
    for name, value in task.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)
        assert twin.state_dict()[name].data_ptr() != value.data_ptr()


def test_wrong_constructor_arguments_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="height"):
        Narrow(height=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="hidden"):
        Recorded()  # type: ignore[call-arg]


# What a task refuses.


@pytest.mark.parametrize("name", ["loss", "metrics", "training_step", "inputs", "tokens"])
@pytest.mark.parametrize("value", [nn.CrossEntropyLoss(), {}, nn.Parameter(torch.ones(1))])
def test_an_attribute_that_would_hide_a_method_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"Plain.{name} is a method of TaskModule.*'{name}_function'"):
        setattr(Plain(), name, value)


def test_the_recorded_arguments_cannot_be_overwritten() -> None:
    class Habit(TaskModule):
        def __init__(self, hparams: dict[str, Any]) -> None:
            super().__init__()
            self.hparams = hparams

    with pytest.raises(ConfigError, match=r"Habit\.hparams is recorded by TaskModule"):
        Habit({"rate": 1})


def test_names_that_are_near_are_free() -> None:
    task = Plain()
    task.loss_function = nn.CrossEntropyLoss()
    task.metric = 3
    assert [name for name, _ in task.named_children()] == ["loss_function"]


# The module that strategies wrap.


def test_the_step_module_runs_what_it_is_told_and_owns_the_task_once() -> None:
    task = Regression()
    module = StepModule(task)
    features, target = next(iter(pairs()))
    assert torch.equal(module(features), task(features))
    module.use(task.training_step)
    assert torch.equal(module((features, target)).loss, task.training_step((features, target)).loss)
    assert [name for name, _ in module.named_children()] == ["task"]
    assert sorted(module.state_dict()) == sorted(f"task.{name}" for name in task.state_dict())


def test_the_step_runs_inside_its_context() -> None:
    seen: list[torch.dtype] = []

    class Looking(Plain):
        def forward(self, image: Any) -> Any:
            seen.append(
                torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
            )
            return image

    StepModule(Looking())(ONE)
    StepModule(Looking(), lambda: torch.autocast("cpu", torch.bfloat16))(ONE)
    assert seen == [torch.float32, torch.bfloat16]
