"""The commands of the pages run on two machines, and give the numbers of one process."""

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.distributed.machines import ended, obstacle, two_machines, until
from tests.distributed.programs.machines import Line, Points, saved
from tests.distributed.running import PROGRAMS
from tests.support.tasks import quiet

from drivetrain.core.registry import is_installed
from drivetrain.testing import run_distributed

PAGES = Path(__file__).parents[3] / "docs" / "how-to"
COMMANDS = {  # a page, and a text of the command's block: the ranks
    ("launching.md", "drivetrain launch --devices 4 --nodes 2 --node-rank 0"): 8,
    ("launching-in-detail.md", "torchrun --nnodes 2"): 4,
    ("launching-in-detail.md", "drivetrain launch --devices 2 --nodes 2 --rendezvous"): 4,
    ("launching-in-detail.md", "MASTER_ADDR=first-host"): 2,
    ("strategies/accelerate.md", "--machine_rank"): 2,
}


@pytest.fixture(autouse=True)
def _possible() -> None:
    if why := obstacle():
        pytest.skip(f"no namespaces: {why}")
    shutil.copy(PROGRAMS / "machines.py", "train.py")


pytestmark = [pytest.mark.nightly, pytest.mark.real("launchers start the ranks of two machines")]


def block(page: str, text: str) -> list[str]:  # the lines of a page's block: for each machine, or for both
    blocks = re.findall(r"```(?:sh|yaml)\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [each for each in blocks if text in each]
    lines = found.splitlines()
    return [lines[0], lines[-1]]


def weights(folder: str, step: int) -> torch.Tensor:
    task = Line.from_checkpoint(f"{folder}/checkpoints/step-{step:08}")
    return torch.cat([each.detach().flatten() for each in task.parameters()])


@pytest.mark.parametrize(("page", "text"), COMMANDS)
def test_a_command_of_a_page_trains_on_two_machines_as_in_one_process(page: str, text: str) -> None:
    ranks = COMMANDS[page, text]
    if "accelerate" in page:
        if not is_installed("accelerate"):
            pytest.skip("needs accelerate")
        content = (PAGES / page).read_text(encoding="utf-8")
        yaml = re.search(r"```yaml\n(.*?)```", content[content.index("## Two machines") :], re.DOTALL)
        assert yaml is not None
        Path("two.yaml").write_text(yaml[1], encoding="utf-8")
    with two_machines() as machines:
        started = [each.start(line) for each, line in zip(machines, block(page, text), strict=True)]
        both = ended(started)
    assert [code for code, _, _ in both] == [0, 0], "\n\n".join(errors for _, _, errors in both)
    found = [json.loads(line) for _, out, _ in both for line in out.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in found) == [*range(ranks)]
    assert len({each["host"] for each in found}) == 2
    alone = Line()
    quiet(max_epochs=1, batch_size=2, gradient_accumulation_steps=ranks).fit(alone, Points(64))
    expected = torch.cat([each.detach().flatten() for each in alone.parameters()])
    for each in found:
        assert each["steps"] == 32 // ranks
        torch.testing.assert_close(torch.tensor(each["weights"]), expected, atol=5e-7, rtol=0)


def test_machines_come_and_go_and_each_start_is_a_fit_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    line, _ = block("launching-in-detail.md", "--nodes 1:2")
    with two_machines() as machines:
        first = machines[0].start(f"{line} saved")
        until(first, Path("steps"), 3, world_size=1)
        second = machines[1].start(f"{line} saved")
        until(first, Path("steps"), 4, world_size=2)
        machines[1].end()
        until(first, Path("steps"), 3, world_size=1)
        Path("stop").touch()
        (code, _, errors), _ = ended([first, second])
    assert code == 0, errors
    made = [[*map(int, each.split())] for each in Path("steps").read_text(encoding="ascii").splitlines()]
    # A step that is not saved yet when a machine is lost is made again, from the checkpoint before.
    begun = [step - 1 for (_, before), (step, size) in pairwise(made) if size != before]
    last = made[-1][0]
    assert len(begun) == 2, made
    Path("stop").unlink()
    for size, start, end in ((2, begun[0], begun[1]), (1, begun[1], last)):
        resume = f"run/checkpoints/step-{start:08}"
        run_distributed(saved, f"again-{size}", end, resume, size, world_size=size)
        assert weights(f"again-{size}", end).equal(weights("run", end)), (size, start, end)


NUMBERED = ("launching.md", "drivetrain launch --devices 4 --nodes 2 --node-rank 0")
MEETING = ("launching-in-detail.md", "drivetrain launch --devices 2 --nodes 2 --rendezvous")


def lines_of(page: str, text: str, options: str) -> list[str]:  # with these options in place of --devices N
    return [re.sub(r"--devices \d", options, each) for each in block(page, text)]


@pytest.mark.parametrize("fails", ["first-host", "second-host"])
@pytest.mark.parametrize(("page", "text"), [NUMBERED, MEETING])
def test_a_failure_before_the_others_connected_ends_all_machines(page: str, text: str, fails: str) -> None:
    with two_machines() as machines:
        lines = lines_of(page, text, "--devices 1 --max-restarts 1")
        started = [each.start(f"{line} fails={fails}") for each, line in zip(machines, lines, strict=True)]
        both = ended(started)
    rank = r"rank \d" if text == MEETING[1] else f"rank {int(fails == 'second-host')}"
    for code, _, errors in both:
        assert code == 1, both
        assert errors.count("all are started again (0 more allowed)") == 1, errors
        last = f"drivetrain: {rank} failed first: it ended with exit code 1"
        assert re.fullmatch(last, errors.splitlines()[-1]), errors


def test_a_port_that_is_in_use_ends_the_job_without_a_restart() -> None:
    line, _ = lines_of(*NUMBERED, "--devices 1 --max-restarts 1")
    busy = "import socket, sys, subprocess; line = socket.create_server(('first-host', 29500)); "
    Path("busy.py").write_text(f"{busy}sys.exit(subprocess.call(sys.argv[1:]))", encoding="ascii")
    with two_machines() as machines:
        ((code, _, errors),) = ended([machines[0].start(f"python busy.py {line}")])
    assert (code, errors.count("drivetrain: ")) == (1, 1), errors
    assert "machine 0 cannot listen on first-host:29500" in errors


@pytest.mark.parametrize(("page", "text"), [NUMBERED, MEETING])
def test_a_machine_that_is_gone_without_a_word_is_noticed(page: str, text: str) -> None:
    with two_machines() as machines:
        lines = lines_of(page, text, "--devices 1")
        jobs = [each.start(f"{line} saved") for each, line in zip(machines, lines, strict=True)]
        until(jobs[0], Path("steps"), 3, world_size=2)
        machines[0].do("ip link set $(ip -o link | grep -o 'dt[0-9]*[ab]') down")
        both = ended(jobs)
    for code, _, errors in both:
        assert code == 1, errors
        assert "its machine has not answered for 30 s" in errors, errors
