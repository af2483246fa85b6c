"""The cross entropy that never holds all logits: the same numbers as torch's, and less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigError, FSDPConfig, OptimizerConfig, TaskModule
from drivetrain.losses import cross_entropy

WORDS, WIDTH = 36, 16


class Unread(Tensor):
    """Targets whose values the host does not read, as on a GPU."""


def made(bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, WORDS, bias)
    with torch.no_grad():
        for each in head.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    hidden = torch.randn(3, 11, WIDTH, generator=generator, requires_grad=True)
    targets = torch.randint(0, WORDS, (3, 11), generator=generator)
    targets[0, :4] = -100
    return head, hidden, targets


def plain(head: Any, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
    logits, flat = F.linear(hidden, head.weight, getattr(head, "bias", None)).flatten(0, 1), targets.flatten()
    if cap := options.pop("soft_cap", None):
        logits = cap * torch.tanh(logits / cap)
    ignored = options.get("ignore_index", -100)
    penalty = options.pop("z_loss", 0.0) * logits.logsumexp(-1)[flat != ignored].square().mean()
    return F.cross_entropy(logits, flat, **options) + penalty


def gradients(loss: Callable[..., Tensor], head: nn.Module, *given: Tensor, **options: Any) -> list[Tensor]:
    result = 3 * loss(head, *given, **options)
    return [result.detach(), *torch.autograd.grad(result, [given[0], *head.parameters()])]


def ours(head: Any, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return cross_entropy(hidden, head, targets, **options)


def recomputed(head: Any, hidden: Tensor, targets: Tensor, **options: Any) -> Any:
    return checkpoint(lambda each: ours(head, each, targets, **options), hidden, use_reentrant=False)


def assert_equal(found: list[Tensor], wanted: list[Tensor], most: float = 1e-6) -> None:
    for each, other in zip(found, wanted, strict=True):
        assert each.dtype == other.dtype
        assert (each - other).abs().max() <= most * other.abs().max()


ALL = {"z_loss": 0.01, "soft_cap": 3.0, "label_smoothing": 0.1}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"z_loss": 0.01}, {"soft_cap": 3.0}, {"label_smoothing": 0.1}, ALL])
def test_the_loss_and_its_gradients_are_those_of_torch(options: dict[str, Any], bias: bool) -> None:
    given = made(bias)
    given[2][given[2] == -100] = 7
    wanted = gradients(plain, *given, ignore_index=7, **options)
    for chunk in (1, 8192):
        assert_equal(gradients(ours, *given, chunk=chunk, ignore_index=7, **options), wanted)
    with torch.no_grad():
        assert ours(*given, ignore_index=7, **options) == pytest.approx(wanted[0].item() / 3, rel=1e-6)
    wide = given[0].double(), given[1].detach().double().requires_grad_(), given[2]
    assert_equal(gradients(ours, *wide, **options), gradients(plain, *wide, **options), most=1e-13)


def test_autocast_recomputation_and_a_tied_embedding_change_no_number() -> None:
    given = made()
    assert_equal(gradients(recomputed, *given, **ALL), gradients(plain, *given, **ALL))
    half = given[0], given[1].detach().bfloat16().requires_grad_(), given[2]
    with torch.autocast("cpu", torch.bfloat16):  # the products are in bfloat16, in either
        assert_equal(gradients(ours, *half, **ALL), gradients(plain, *half, **ALL), most=1e-2)
    embedding = nn.Embedding(WORDS, WIDTH)
    results = []
    for loss in (ours, plain):
        (found,) = torch.autograd.grad(
            loss(embedding, embedding(given[2].abs() % WORDS), given[2]), embedding.weight
        )
        results.append(found)
    assert_equal(results[:1], results[1:])


@pytest.mark.parametrize(("chunk", "most"), [(8192, 25), (4, 4)])
def test_there_are_never_the_logits_of_more_tokens_than_a_chunk(chunk: int, most: int) -> None:
    class Rows(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.shape[-1:] == (WORDS,):
                self.most = max(self.most, result.numel() // WORDS)
            return result

    head, hidden, targets = made(bias=False)
    hidden, targets = hidden.repeat(6, 1, 1), targets.repeat(6, 1)
    with Rows() as rows:
        ours(head, hidden, targets, chunk=chunk).backward()
    assert rows.most == max(most, WIDTH)  # the transposed weight has as many


@pytest.mark.parametrize("rows", [3, 0])
def test_a_mean_over_nothing_is_nan_and_has_no_gradient(rows: int) -> None:
    head, hidden, targets = made()
    loss, *found = gradients(ours, head, hidden[:rows], torch.full_like(targets[:rows], -100))
    assert loss.isnan()
    assert not any(each.any() for each in found)


def test_a_head_that_is_split_over_the_words_is_not_gathered() -> None:
    def on_rank() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.distributed.tensor.debug import CommDebugMode
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        head, hidden, targets = made()
        wanted = gradients(plain, head, hidden, targets, **ALL)
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(head, mesh, ColwiseParallel())
        with CommDebugMode() as calls:
            found = gradients(ours, head, hidden, targets, **ALL)
        assert not any("gather" in str(each) for each in calls.get_comm_counts())
        assert found[2].placements == (Shard(0),)
        assert_equal([*found[:2], *(each.full_tensor() for each in found[2:])], wanted)
        parts = distribute_tensor(hidden.detach(), mesh, [Shard(1)]).requires_grad_()  # split over the tokens
        loss, of_parts, *_ = gradients(ours, head, parts, targets, **ALL)
        assert_equal([loss, of_parts.full_tensor()], wanted[:2])

    on_two_ranks(on_rank)


class WithHead(TaskModule):  # a language model, whose head is called by its loss alone
    def __init__(self, tied: bool, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = self.embedding if tied else nn.Linear(WIDTH, WORDS, bias=False)
        self.loss_of = loss

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        result = self.loss_of(self.head, outputs, batch[1], **ALL)
        assert hasattr(self.head, "reshard") is hasattr(self.head.weight, "placements")  # freed again
        return result

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.5)


def trained(tied: bool, loss: Any, strategy: Any = "cpu", size: int = 1) -> Any:
    tokens = torch.randint(0, WORDS, (8, 7), generator=torch.Generator().manual_seed(3))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4 // size)
    task = WithHead(tied, loss)
    quiet(max_epochs=2, strategy=strategy, devices=size).fit(task, data)
    return [each.detach() for each in task.parameters()]


@pytest.mark.parametrize("tied", [False, True])
def test_a_fit_under_ddp_and_fsdp_is_that_of_the_plain_loss(tied: bool) -> None:
    wanted = trained(tied, plain)
    apart = FSDPConfig(wrap=("Embedding",))
    for found in on_two_ranks(lambda: [trained(tied, ours, each, 2) for each in ("ddp", "fsdp", apart)]):
        for each in found:
            assert_equal(each, wanted, most=2e-6)


def test_refusals_of_cross_entropy() -> None:
    head, hidden, targets = made()
    wrong = targets.clone()
    wrong[1, 1] = WORDS

    def given(head: Any = head, hidden: Tensor = hidden, targets: Tensor = targets, **options: Any) -> Any:
        return lambda: cross_entropy(hidden, head, targets, **options)

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    patched, restored = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)
    patched.forward = lambda input: 2 * nn.Linear.forward(patched, input)  # type: ignore[method-assign]
    restored.forward = restored.forward  # type: ignore[method-assign]
    given(restored)()
    cases: dict[str, tuple[Any, ...]] = {
        "a second derivative": (lambda: given()().backward(create_graph=True), "second derivative"),
        "a forward of its own": (given(Doubled(WIDTH, WORDS)), "Doubled", "forward of its own"),
        "a replaced forward": (given(patched), "Linear has a forward of its own"),
        "chunk": (given(chunk=0), "chunk=", "at least 1, not 0"),
        "z_loss": (given(z_loss=-1.0), "z_loss=", "at least 0"),
        "soft_cap": (given(soft_cap=0.0), "soft_cap=", "above 0"),
        "label_smoothing": (given(label_smoothing=1.5), "label_smoothing=", "at most 1"),
        "a sequence as head": (given(nn.Sequential(head)), "head=", "nn.Linear", "container.Sequential"),
        "a weight as head": (given(head.weight), "head=", "Parameter"),
        "hidden": (given(hidden=hidden[..., 1:]), "(3, 11, 15)", "(36, 16)", "(words, features)"),
        "fewer targets": (given(targets=targets[1:]), "(2, 11)", "do not fit"),
        "probabilities": (given(targets=targets.float()), "targets=", "not torch.float32"),
        "a word of another vocabulary": (given(targets=wrong), "the target 36", "36 words", "-100"),
    }
    assert_refused(ConfigError, cases)
    elsewhere = wrong.as_subclass(Unread)  # on a GPU it is not read, and the loss tells
    assert Tensor(given(targets=elsewhere)().as_subclass(Tensor)).isnan()
