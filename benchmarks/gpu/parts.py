"""The parts of the run on a GPU that measure; each takes a journal, a size and a device."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import CheckpointConfig, CompileConfig
from drivetrain.integrations.torchao.float8 import Float8
from gpu.journal import Journal
from gpu.profiles import ProfilingClock, summary
from gpu.waits import without_waiting
from gpu.ways import BARE, GPT_WAYS, OTHERS, Way, memory, prepared, take_turns, waits_for
from gpu.works import Amount, Size, with_rows
from peers import HAND, OURS
from peers.ours import Task, trainer
from turns import silenced
from workloads import Clock, Job

Part = Callable[[Journal, Size, str], None]

_STATE = ("driver_version", "clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw", "power.limit")
_SLOWED = ("clocks_throttle_reasons.active",)  # newer drivers may have another name for it


def smi(what: str, *names: str) -> dict[str, str]:
    """Return what nvidia-smi says about the first GPU, by name; or why it says nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"nvidia-smi": "not here"}
    command = [program, f"--query-{what}={','.join(names)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except subprocess.TimeoutExpired:
        return {"nvidia-smi": "no answer within 15 seconds"}
    lines = done.stdout.splitlines()
    if done.returncode or what != "gpu" or not lines:
        return {what: "; ".join(lines) or done.stderr.strip() or "none"}
    return dict(zip(names, lines[0].split(", "), strict=False))


def facts(journal: Journal, size: Size, device: str) -> None:
    """The machine: versions, the compiler that Triton needs, clocks, and who else uses the GPU."""
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    found: dict[str, Any] = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CPU cores": os.cpu_count(),
        "torch's threads": f"{torch.get_num_threads()}, OMP_NUM_THREADS {threads}",
        "C compiler": os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "none: no Triton",
        "Triton": importlib.util.find_spec("triton") is not None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        found |= {
            "GPU": f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, capability {capability}",
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
    found |= smi("gpu", *_STATE) | smi("gpu", *_SLOWED)
    found |= smi("compute-apps", "pid", "process_name", "used_memory")
    for name, value in found.items():
        journal.write("fact", name=name, value=str(value))


def mlp(journal: Journal, size: Size, device: str) -> None:
    """Models that are all overhead, with one micro-batch and several."""
    for round_ in range(size.rounds):
        for work, amount in size.tiny:
            ways = BARE + OTHERS
            take_turns(journal, ways, work, amount, size, device, precision="32", rounds=(round_,))


def gpt2(journal: Journal, size: Size, device: str) -> None:
    """GPT-2 124M in bf16, compiled; what a plan forecasts of its memory."""
    work, shape = size.gpt.work(), size.gpt
    unfused = replace(work, fused=False)  # a plan has no values for fused kernels; the state is the same
    with journal.attempt("plan"), prepared(unfused, Amount(1, 1, 1), size, device, "bf16") as job:
        with silenced():
            plan = trainer(job).plan(Task(job), job.data)
        journal.write("plan", work=work.name, memory=plan.memory)
    turns = partial(take_turns, journal, work=work, amount=size.long, size=size, device=device)
    rounds = tuple(range(size.rounds))
    turns(GPT_WAYS, rounds=rounds, flops=shape.flops(), unit="tokens", units=shape.length)
    if device == "cuda":
        for name, value in {**smi("gpu", *_STATE[1:]), **smi("gpu", *_SLOWED)}.items():
            journal.write("fact", name=f"after GPT-2: {name}", value=value)


def resnet(journal: Journal, size: Size, device: str) -> None:
    """ResNet-50 in bf16 with the channels last, with cuDNN's trial of algorithms and without."""
    tried = ", cudnn.benchmark"
    ways = (
        *BARE,
        Way(HAND + tried, HAND, beside=HAND + tried, benchmark=True),
        Way(OURS + tried, OURS, beside=HAND + tried, benchmark=True),
    )
    rounds, flops = tuple(range(size.rounds)), size.resnet.flops()
    work = size.resnet.work()
    take_turns(journal, ways, work, size.images, size, device, rounds=rounds, flops=flops, unit="images")


def saves(journal: Journal, size: Size, device: str) -> None:
    """GPT-2 without a save, with a synchronous one, and with one in the background.

    There is one save, in the middle: a second one would wait until the disk has the first.
    """
    work, whole = size.gpt.work(), replace(size.long, block=size.long.steps)
    middle = whole.warm_up + whole.steps // 2
    policies: dict[str, Any] = {"none": False}
    for name in ("synchronous", "in the background"):
        background = name != "synchronous"
        policies[name] = CheckpointConfig(every=f"{middle} steps", keep_last=1, asynchronous=background)
    for name, policy in policies.items():
        with journal.attempt(f"saves: {name}"), prepared(work, whole, size, device, "bf16") as job:
            with silenced():
                trainer(job, checkpoint=policy, run_dir=job.directory).fit(Task(job), job.data)
            clock: Any = job.clock
            (seconds,) = job.blocks(clock.times)
            gaps = [after - before for before, after in pairwise(clock.times[whole.warm_up : -1])]
            journal.write(
                "saves",
                policy=name,
                saves=int(policy is not False),
                steps=whole.steps,
                seconds=seconds,
                median_gap=statistics.median(gaps),
                longest_gap=max(gaps),
                **memory(device),
            )


class _Limited(nn.Module):
    """A model that runs out of memory where a CPU would not.

    Args:
        net: The model.
        rows: The most rows for which there is memory.
    """

    def __init__(self, net: nn.Module, rows: int) -> None:
        super().__init__()
        self.net = net
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.rows:
            raise torch.OutOfMemoryError(f"out of memory: {len(x)} rows, of {self.rows} at most")
        return self.net(x)


def out_of_memory(journal: Journal, size: Size, device: str) -> None:
    """GPT-2 with a batch that does not fit: the error, the batch split by us, and by hand.

    The process gets a little more memory than a batch of the size that fits has used.
    """
    fits, more = size.fits, 4
    amount = replace(size.long, block=size.long.steps)
    one = with_rows(size.gpt.work(), fits)
    big = with_rows(one, fits * more)

    # A batch of the small size takes less than the smallest piece that torch's allocator reserves.
    fills = device == "cuda" and not size.fp8_emulated

    def fit(case: str, job: Job, **options: Any) -> None:
        seen: list[int] = []
        if not fills:
            job.net = _Limited(job.net, fits)
        job.net.register_forward_hook(lambda module, inputs, outputs: seen.append(len(inputs[0])))
        with silenced():
            trainer(job, **options).fit(Task(job), job.data)
        found: Any = job.clock
        # A step has as many losses as it has micro-batches, so only the last ones are sure.
        parts = max(1, job.work.rows * job.accumulation // seen[-1])
        ticks = parts * job.steps
        seconds = (found.times[-1] - found.times[-1 - ticks]) / job.steps
        journal.write("memory", case=case, rows=job.work.rows * job.accumulation, micro_batch=seen[-1],
                      seconds=seconds, **memory(device))  # fmt: skip

    def measure(case: str, work: Any, accumulation: int = 1, **options: Any) -> None:
        with prepared(work, replace(amount, accumulation=accumulation), size, device, "bf16") as job:
            job.clock = _WaitingClock(waits_for(device))
            fit(case, job, **options)

    with journal.attempt("a batch that fits"):
        measure("fits", one)
    with journal.attempt("by hand"):
        measure("accumulated by hand", one, accumulation=more)
    if fills:
        total = torch.cuda.get_device_properties(0).total_memory
        limit = int(1.3 * torch.cuda.max_memory_reserved())
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        journal.write("fact", name="memory given to the part that runs out of it, bytes", value=str(limit))
    try:
        with journal.attempt("a batch that does not fit"):
            try:
                measure("does not fit", big)
            except torch.OutOfMemoryError as error:
                said = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
                journal.write(
                    "memory", case="does not fit", rows=big.rows, error=said[0][:200], said=said[1:]
                )
            else:
                raise RuntimeError(f"{big.rows} rows were to fill the memory, and did not")
        with journal.attempt("split until it fits"):
            measure("micro_batch='auto'", big, micro_batch="auto")
    finally:
        if fills:
            torch.cuda.set_per_process_memory_fraction(1.0)


class _WaitingClock(Clock):
    """Waits for the device before it notes the time; it serves steps of unknown micro-batches.

    Args:
        wait: Waits for the device.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.wait = wait

    def __call__(self) -> None:
        """Note the time."""
        self.wait()
        super().__call__()


def profiled(journal: Journal, size: Size, device: str) -> None:
    """What the GPU does in some steps of an MLP and of GPT-2; and waits for it as errors."""
    gpt, count = size.gpt.work(), size.profiled
    cases: list[tuple[Any, Amount, Iterable[Way], str]] = [
        *((work, replace(amount, steps=count, block=count), BARE, "32") for work, amount in size.tiny[:3]),
        (gpt, replace(size.long, steps=count, block=count), GPT_WAYS[:2], "bf16"),
    ]
    for work, amount, ways, precision in cases:
        for way in ways:
            k = amount.accumulation
            what = f"{work.name}, {k} micro-batches: {way.name}"
            with journal.attempt(what), prepared(work, amount, size, device, precision) as job:
                clock = ProfilingClock(amount.warm_up * k, amount.steps * k, device, waits_for(device))
                job.clock = clock
                try:
                    with silenced():
                        way.train(job)
                finally:
                    clock.stop()
                found = summary(clock.trace(job.directory), amount.steps)
                names = {"work": work.name, "micro_batches": k, "contestant": way.name}
                journal.write("profile", **names, **found)
    set_mode: Callable[[str], Any] = torch.cuda.set_sync_debug_mode if device == "cuda" else lambda mode: None
    with journal.attempt("waits as errors"), prepared(gpt, size.long, size, device, "bf16") as job:
        job.clock, job.compiled = Clock(), CompileConfig(backend=size.backend)
        watched = without_waiting(job, set_mode, size.every)
        journal.write("waits", work=gpt.name, watched=watched, steps=job.count)


def fp8(journal: Journal, size: Size, device: str) -> None:
    """GPT-2 with its linear layers in float8, beside bf16."""
    if importlib.util.find_spec("torchao") is None:
        journal.write("left out", work=size.gpt.work().name, contestant="fp8", why="no torchao here")
        return
    bf16 = f"{OURS}, bf16"
    precision = Float8(emulate=size.fp8_emulated)
    compiled = "" if size.fp8_emulated else "blocks"
    ways = (
        Way(bf16, OURS, compiled, beside=bf16),
        Way(f"{OURS}, fp8", OURS, compiled, beside=bf16, options={"precision": precision}),
    )
    shape = size.gpt
    take_turns(journal, ways, shape.work(), size.long, size, device, flops=shape.flops(), unit="tokens",
               units=shape.length)  # fmt: skip


PARTS: dict[str, Part] = {
    "facts": facts,
    "mlp": mlp,
    "gpt2": gpt2,
    "resnet": resnet,
    "saves": saves,
    "memory": out_of_memory,
    "profile": profiled,
    "fp8": fp8,
}
