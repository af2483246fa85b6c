"""Runs go on from the weights that DeepSpeed has saved; no code in its files ever runs."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from tests.checkpoint.weights.models import Planted
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet as quiet_trainer
from torch import nn
from torch.nn import functional as F

from drivetrain import CheckpointError, OptimizerConfig, TaskModule
from drivetrain.checkpoint import DamagedCheckpointError, load_weights, verify
from drivetrain.checkpoint.foreign.deepspeed import import_deepspeed
from drivetrain.cli.main import main
from drivetrain.strategies import SingleDevice
from drivetrain.testing import run_distributed

pytest.importorskip("deepspeed")
from drivetrain.strategies.deepspeed.library import connect, library, quiet

pytestmark = [
    pytest.mark.landing,  # DeepSpeed trains seven models
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
]

SAVED, ALL = 3, 6  # after which step DeepSpeed saves, and how many it makes
VARIANTS = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    # Groups in several pieces; parameters in another order, or with gaps; the optimizer for bfloat16.
    "pieces": {"stage": 3, "sub_group_size": 20},
    "in turn": {"stage": 2, "round_robin_gradients": True},
    "aligned": {"stage": 2, "parameter_alignment": True},
    "bf16": {"stage": 1},
}
INNER = f"global_step{SAVED}"
OPTIMIZER, MODEL = "zero_pp_rank_{}_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


class Net(nn.Module):  # a parameter of each kind: tied, frozen, in groups of their own; and buffers
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.first = nn.Linear(5, 7, bias=False)
        self.middle = nn.Linear(7, 5)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(7, 3)
        self.factor = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((2,), 0.25))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x):
        inner = torch.tanh(self.again(self.middle(torch.tanh(self.first(x)))))
        return self.last(inner) * self.factor + self.frozen + self.shift.sum()


def net():
    torch.manual_seed(0)
    return Net()


def part(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def joined(step):
    (x, y), (more_x, more_y) = part(step, 0), part(step, 1)
    return {"x": torch.cat([x, more_x]), "y": torch.cat([y, more_y])}


class Task(TaskModule):  # the same as a task, with other values before they are loaded
    def __init__(self, **options):
        super().__init__()
        self.net = net()
        with torch.no_grad():
            for each in self.parameters():
                each.zero_()
        self.options = {"lr": 1e-2, "weight_decay": 0.1, **options}

    def forward(self, x):
        return self.net(x)

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch["y"])

    def configure_optimizers(self):
        return OptimizerConfig("adamw", **self.options)


def _train_with_deepspeed(root):
    deepspeed = library("cpu")
    connect(deepspeed)
    rank = torch.distributed.get_rank()
    losses = {}
    for name, zero in VARIANTS.items():
        module = net()
        trained = [each for each in module.parameters() if each.requires_grad]
        matrices = {"params": [each for each in trained if each.ndim > 1], "weight_decay": 0.1}
        vectors = {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([matrices, vectors], lr=1e-2)
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "gradient_clipping": 0.0}
        config["zero_allow_untested_optimizer"] = True
        if name == "bf16":
            config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        with quiet():
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
            losses[name] = [_step(engine, step, rank) for step in range(SAVED)]
            # As Megatron and others do, with values of classes of theirs.
            engine.save_checkpoint(f"{root}/{name}", client_state={"from": Path("anywhere")})
            losses[name] += [_step(engine, step, rank) for step in range(SAVED, ALL)]
    return losses


def _step(engine, step, rank):
    x, y = part(step, rank)
    loss = F.mse_loss(engine(x.to(engine.module.first.weight.dtype)).float(), y)
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):  # the folders, by variant, and the loss of the next step
    library("cpu")  # once, of which all processes are copies
    root = tmp_path_factory.mktemp("deepspeed")
    first, second = run_distributed(_train_with_deepspeed, root)
    return root, {name: (first[name][SAVED] + second[name][SAVED]) / 2 for name in VARIANTS}


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved[0] / "zero2", tmp_path / "folder"))


def loss_of(path, rename=None):
    task = Task()
    task.load_weights(path, rename=rename)
    trainer = quiet_trainer(strategy=SingleDevice("cpu"), max_steps=1)
    return float(next(iter(trainer.steps(task, [joined(SAVED)]))).loss)


def test_weights_are_the_optimizers_in_float32_and_load_under_any_name(capsys, saved, tmp_path):
    for name, zero in VARIANTS.items():
        path = tmp_path / name
        found = import_deepspeed(saved[0] / name, path)
        assert (found.stage, found.processes, found.steps, found.tensors) == (zero["stage"], 2, SAVED, 10)
        module, task = net(), Task()
        module.load_state_dict(load_weights(path), strict=True)
        report = task.load_weights(path, rename={"^": "net."})
        assert (len(report.loaded), report.converted) == (10, ())
        assert torch.equal(task.net.last.weight, module.last.weight)
        assert not torch.equal(module.last.weight, module.last.weight.bfloat16().float())
        assert (module.frozen.tolist(), module.count) == ([0.5] * 3, 7)
        assert torch.equal(load_weights(path)["again.weight"], module.first.weight)
        expected = pytest.approx(saved[1][name], rel=1e-2 if name == "bf16" else 1e-6)
        assert loss_of(path, {"^": "net."}) == expected, name
    command = ["import-deepspeed", str(saved[0] / "zero1"), str(tmp_path / "imported"), "--rename", "^=net."]
    assert main(["checkpoint", *command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stage"] == 1
    verify(command[2])
    fit = lambda: quiet_trainer(max_steps=ALL).fit(Task(), [joined(SAVED)], resume=command[2])  # noqa: E731
    folder = lambda: Task().load_weights(str(saved[0] / "zero3"))  # noqa: E731
    cases = {"resume": (fit, "holds weights only", "load_weights"), "folder": (folder, "import-deepspeed")}
    assert_refused(CheckpointError, cases)


def changed(folder, name, change):  # change what is in a file; ours to unpickle, as this test wrote it
    content = torch.load(folder / INNER / name, weights_only=False)
    change(content)
    torch.save(content, folder / INNER / name)


def refused(folder, match, **options):
    with pytest.raises(CheckpointError, match=match) as caught:
        import_deepspeed(folder, folder.parent / "out", **options)
    assert not (folder.parent / "out").exists()
    return caught.value


def test_folders_of_other_kinds_are_told(folder):
    inner = folder / INNER
    refused(folder, f"no folder 'step9' inside. The folders with .* are: {INNER}", tag="step9")
    (folder / "latest").unlink()
    refused(folder, f"Give one of '{INNER}' as the tag")
    import_deepspeed(folder, folder.parent / "by the tag", tag=inner.name)
    (inner / "layer_00-model_states.pt").touch()
    refused(inner, "pipeline stages or experts")
    (inner / "layer_00-model_states.pt").unlink()
    for rank in (0, 1):
        (inner / OPTIMIZER.format(rank)).unlink()
    refused(inner, r"without ZeRO \(stage 0\)")
    (inner / MODEL).unlink()
    refused(folder, "is not a DeepSpeed checkpoint")


def put(key, value):
    return lambda content: content["optimizer_state_dict"].__setitem__(key, value)


def each_state(change):  # to change the optimizer's state of every group
    def apply(content):
        for each in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            change(each)

    return apply


def shorten(content):
    pieces = content["optimizer_state_dict"]["fp32_flat_groups"]
    pieces[0] = pieces[0][:-1].clone()


PIECES = "single_partition_of_fp32_groups"
FIRST, SECOND = map(OPTIMIZER.format, (0, 1))
DAMAGE = [
    (FIRST, put("zero_stage", 4), "ZeRO stage 4 .saved by DeepSpeed .*only stages 1, 2 and 3"),
    (FIRST, put(PIECES, None), f"no '{PIECES}'"),
    (FIRST, put(PIECES, [1, 2]), "no numbers as the weights of group 0"),
    (FIRST, put(PIECES, [torch.ones(1)] * 2), "not as ZeRO 2 divides"),
    (FIRST, put(PIECES, [torch.ones(900)] * 2), "not as ZeRO 2 divides"),
    (FIRST, put("param_alignment_paddings", [[0, -1], []]), "paddings that are not numbers"),
    (FIRST, put("partition_count", [2, 3]), "saved by 3 processes, and there are files of 2"),
    (FIRST, each_state(lambda each: each.update(step=9)), f"{SECOND}' is of another checkpoint"),
    (MODEL, lambda content: content.pop("module"), "no 'module' .saved by DeepSpeed"),
    (MODEL, lambda content: content["param_shapes"].pop(), "2 pieces of weights, .* the names of 1"),
    (MODEL, lambda content: content["module"].update(frozen="x"), "no tensor as 'frozen'"),
]


def test_damaged_and_mixed_files_are_refused(saved, folder, tmp_path):
    for name, change, match in DAMAGE:
        kept = (folder / INNER / name).read_bytes()
        changed(folder, name, change)
        refused(folder, match)
        (folder / INNER / name).write_bytes(kept)
    shutil.copy(saved[0] / "zero1" / INNER / SECOND, folder / INNER / SECOND)
    refused(folder, f"{SECOND}' is of another checkpoint than the first process's file")
    (folder / INNER / SECOND).unlink()
    refused(folder, "saved by 2 processes")
    third = Path(shutil.copytree(saved[0] / "zero3", tmp_path / "third"))
    changed(third, SECOND, shorten)
    refused(third, r"not as ZeRO 3 divides them among 2 processes: each must have \d+ numbers")
    shutil.copy(saved[0] / "zero3" / INNER / SECOND, third / INNER / SECOND)
    (third / INNER / f"zero_pp_rank_1_{MODEL}").unlink()
    refused(third, "2 of the 3 numbers of 'frozen'")
    (third / INNER / FIRST).unlink()
    refused(third, "lacks the .*optim_states.pt of the processes 0")


def test_pieces_in_16_bits_are_imported(folder, tmp_path):
    for name in (FIRST, SECOND):
        content = torch.load(folder / INNER / name, weights_only=False)["optimizer_state_dict"]
        changed(folder, name, put(PIECES, [each.bfloat16() for each in content[PIECES]]))
    import_deepspeed(folder, tmp_path / "half")
    assert load_weights(tmp_path / "half")["last.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER.format(0), OPTIMIZER.format(1)])
def test_nothing_in_a_planted_folder_runs(saved, folder, tmp_path, name):
    sign = tmp_path / "it ran"
    changed(folder, name, lambda content: content.__setitem__("client", Planted(sign)))
    import_deepspeed(folder, tmp_path / "imported", rename={"^": "net."})
    assert loss_of(tmp_path / "imported") == pytest.approx(saved[1]["zero2"], rel=1e-6)
    path = folder / INNER / name
    path.write_bytes(path.read_bytes()[:-100])
    assert isinstance(refused(folder, "is not what torch.save writes"), DamagedCheckpointError)
    path.write_bytes(pickle.dumps(Planted(sign)))
    refused(folder, "not a zip file")
    torch.save(Planted(sign), path)
    refused(folder, "is not a mapping")
    assert not sign.exists()
    torch.load(path, weights_only=False)
    assert sign.exists()  # so that it is one that would have run
