"""What is trained on a GPU, and for how long: GPT-2 124M, ResNet-50, and models that are all overhead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from workloads import GPT, TINY, Batch, Work, deep, tokens


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT, by default those of GPT-2 124M.

    Attributes:
        layers: The number of blocks.
        width: Of the residual stream.
        heads: Of a block.
        size: Of the vocabulary, rounded up to a multiple of 64.
        length: Tokens of a sample.
        rows: Samples of a batch.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    size: int = 50_304
    length: int = 1024
    rows: int = 16

    def work(self) -> Work:
        """Return the model and its data."""
        return Work(
            "GPT-2 124M",
            lambda: GPT(self.layers, self.width, self.heads, self.size, self.length, tied=True),
            lambda count, rows: tokens(count, rows, self.length, self.size),
            self.rows,
            "adamw",
            6e-4,
        )

    def flops(self) -> int:
        """Return the operations of a sample, forward and backward.

        6 for each parameter and token, and 12 x layers x width x length a token for attention's scores
        (Chowdhery et al., "PaLM", JMLR 2023, appendix B). The tied embedding is the output's matrix, and
        counts once.
        """
        with torch.device("meta"):
            parameters = sum(each.numel() for each in self.work().model().parameters())
        return self.length * (6 * parameters + 12 * self.layers * self.width * self.length)


class Bottleneck(nn.Module):
    """A block of three convolutions around which the input is added (He et al., CVPR 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """A residual network, by default ResNet-50, with the stride in the 3x3 convolutions (torchvision's)."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        layers = [stem, nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        inputs = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                inner = width << stage
                layers.append(Bottleneck(inputs, inner, 2 if stage and not block else 1))
                inputs = 4 * inner
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@dataclass(frozen=True)
class Images:
    """The sizes of a residual network and of its images, by default those of ResNet-50.

    Attributes:
        blocks: Of each stage.
        width: Channels of the first stage.
        classes: Outputs.
        side: Pixels of an image.
        rows: Images of a batch.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    side: int = 224
    rows: int = 256

    def model(self) -> Any:
        """Return the network, whose weights have the channels last."""
        net: Any = ResNet(self.blocks, self.width, self.classes)
        return net.to(memory_format=torch.channels_last)

    @cache  # noqa: B019  two objects at most, of which a machine's contestants take turns with the same data
    def two(self, rows: int) -> list[Batch]:
        """Return two batches; the class is where the brightest stripe is."""
        generator = torch.Generator().manual_seed(0)
        made = []
        for _ in range(2):
            label = torch.randint(0, 10, (rows,), generator=generator)
            x = torch.randn(rows, 3, self.side, self.side, generator=generator)
            stripes = torch.arange(self.side) * 10 // self.side
            x += 3.0 * (stripes == label[:, None])[:, None, None, :]
            made.append({"x": x.contiguous(memory_format=torch.channels_last), "label": label})
        return made

    def batches(self, count: int, rows: int) -> list[Batch]:
        """Return the two batches in turns."""
        return [self.two(rows)[number % 2] for number in range(count)]

    def work(self) -> Work:
        """Return the model and its data."""
        return Work("ResNet-50", self.model, self.batches, self.rows, "adamw", 1e-3)

    def flops(self) -> int:
        """Return the operations of an image, forward and backward: three times those of the forward."""
        with torch.device("meta"):
            net, image = (
                ResNet(self.blocks, self.width, self.classes),
                torch.empty(1, 3, self.side, self.side),
            )
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.eval()(image)
        return 3 * int(counter.get_total_flops())


@dataclass(frozen=True)
class Amount:
    """How long something is trained.

    Attributes:
        steps: That are timed.
        block: Steps whose time is taken together.
        warm_up: Steps before them.
        accumulation: Micro-batches of a step.
    """

    steps: int
    block: int
    warm_up: int = 5
    accumulation: int = 1


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        gpt: The GPT.
        resnet: The network of images.
        long: The steps of the GPT.
        images: The steps of the ResNet.
        tiny: Models of nearly nothing but overhead, with the steps of each.
        rounds: How often the contestants take turns.
        fits: Rows of the GPT for which there is memory in the part that runs out of it.
        every: Steps from log point to log point where waits are errors.
        profiled: Steps under the profiler.
        backend: What compiles.
        fp8_emulated: Whether float8 is emulated.
    """

    gpt: Shape
    resnet: Images
    long: Amount
    images: Amount
    tiny: tuple[tuple[Work, Amount], ...]
    rounds: int
    fits: int
    every: int
    profiled: int
    backend: str = "inductor"
    fp8_emulated: bool = False


DEEP = deep(50)

FULL = Size(
    gpt=Shape(),
    resnet=Images(),
    long=Amount(30, 10),
    images=Amount(20, 5),
    tiny=(
        (TINY, Amount(2000, 500, 60)),
        (TINY, Amount(500, 125, 20, accumulation=8)),
        (DEEP, Amount(200, 50, 20)),
        (DEEP, Amount(40, 10, 3, accumulation=8)),
    ),
    rounds=2,
    fits=8,
    every=10,
    profiled=5,
)

SMALL = Size(
    gpt=Shape(layers=2, width=16, heads=2, size=32, length=16, rows=4),
    resnet=Images((1, 1), 4, 10, 16, 4),
    long=Amount(6, 3, 2),
    images=Amount(4, 2, 1),
    tiny=((TINY, Amount(6, 3, 2)), (TINY, Amount(4, 2, 1, accumulation=4))),
    rounds=1,
    fits=1,
    every=3,
    profiled=2,
    backend="eager",
    fp8_emulated=True,
)

SIZES = {"full": FULL, "small": SMALL}


def with_rows(work: Work, rows: int) -> Work:
    """Return the same work with other batches."""
    return replace(work, rows=rows)
