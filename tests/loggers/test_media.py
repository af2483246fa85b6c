"""Images, figures and the other values beside numbers, from `run.log` to the files of loggers."""

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.messages import warned
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import LambdaCallback, Run, StepOutput
from drivetrain.core.errors import ConfigError
from drivetrain.loggers import Audio, Figure, File, Histogram, Image, Table, Text, Video

pillow = pytest.importorskip("PIL.Image")


class Drawing:  # as matplotlib's Figure
    def savefig(self, file: Any, **options: Any) -> None:
        file.write(Image(torch.ones(1, 2, 3)).data)


class Watched(torch.Tensor):  # counts its copies to the host
    copies = 0

    def cpu(self) -> torch.Tensor:
        Watched.copies += 1
        return self.as_subclass(torch.Tensor)


def fit(directory: Path, loggers: Any = "tensorboard", task: Any = None, **hooks: Any) -> None:
    callbacks = [LambdaCallback(**hooks)]
    options = {"max_steps": 4, "log_every": 2, "loggers": loggers, "callbacks": callbacks}
    quiet(**options, run_dir=directory).fit(task or Regression(), pairs(20))


def pixels(data: bytes) -> Any:
    return np.asarray(pillow.open(io.BytesIO(data)))


def test_tensorboard_has_what_a_fit_has_logged(tmp_path: Path) -> None:
    colours = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0))
    wrong = torch.tensor([[0.0, 1.5], [0.5, float("nan")]])

    def log(run: Run) -> None:
        run.log("of/colours", Image(colours))
        run.log("clipped", Image(wrong))
        run.log("drawn", Figure(Drawing()))
        run.log("film", Video(torch.rand(3, 1, 8, 6)))
        run.log("sound", Audio(torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, 0.0]]), 8000))
        run.log("counts", Histogram(torch.tensor([1.0, 2.0, 2.0, float("inf")]), bins=2))
        run.log("text", Text("**bold**"))
        run.log("table", Table(["a", "b"], [[1, "x|y"], [torch.tensor(2.5), None]]))

    with warned("'clipped': its numbers are from nan to nan and were clipped to 0 to 1") as said:
        fit(tmp_path, on_log=log)
    assert len(said) == 1
    reader = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    reader.Reload()
    found = {tag: reader.Images(tag) for tag in reader.Tags()["images"]}
    assert {tag: [each.step for each in events] for tag, events in found.items()} == {
        tag: [2, 4] for tag in ("of/colours", "clipped", "drawn", "film")
    }
    last = {tag: events[-1].encoded_image_string for tag, events in found.items()}
    assert (pixels(last["of/colours"]) == (colours.permute(1, 2, 0) * 255 + 0.5).byte().numpy()).all()
    assert pixels(last["clipped"]).tolist() == [[0, 255], [128, 0]]
    assert pixels(last["drawn"]).tolist() == [[255] * 3] * 2
    film = pillow.open(io.BytesIO(last["film"]))
    assert (film.n_frames, film.size, film.info["duration"]) == (3, (6, 8), 250)
    sizes = {tag: (events[0].width, events[0].height) for tag, events in found.items()}
    assert sizes == {"of/colours": (5, 4), "clipped": (2, 2), "drawn": (3, 2), "film": (6, 8)}
    with wave.open(io.BytesIO(reader.Audio("sound")[0].encoded_audio_string)) as sound:
        assert (sound.getnchannels(), sound.getframerate()) == (2, 8000)
        assert np.frombuffer(sound.readframes(3), "<i2").tolist() == [0, 16383, 32767, 0, -32767, 0]
    histogram = reader.Histograms("counts")[0].histogram_value
    assert (histogram.num, list(histogram.bucket)) == (3, [0, 1, 2])
    texts = {tag: reader.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in ("text", "table")}
    assert texts == {"text": "**bold**", "table": "| a | b |\n| --- | --- |\n| 1 | x\\|y |\n| 2.5 | None |"}


def test_between_log_points_nothing_is_copied_to_the_host_and_changes_do_not_count(
    tmp_path: Path,
) -> None:
    changing = torch.zeros(1, 2, 2)
    copies = []

    def log(run: Run) -> None:
        run.log("watched", Image(torch.ones(1, 2, 2).as_subclass(Watched)))
        if run.progress.steps == 1:
            run.log("changing", Image(changing))
            changing.fill_(1.0)
        copies.append(Watched.copies)

    Watched.copies = 0
    late = LambdaCallback(on_epoch_end=lambda run: run.log("late", Text("after the last log point")))
    options = {"max_steps": 4, "log_every": 2, "callbacks": [LambdaCallback(on_step_end=log), late]}
    quiet(**options, loggers="tensorboard", run_dir=tmp_path).fit(Regression(), pairs(8))
    assert copies == [0, 0, 1, 1]
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert not pixels(reader.Images("changing")[0].encoded_image_string).any()
    assert [each.step for each in reader.Tensors("late")] == [4]
    quiet(**options).fit(Regression(), pairs(8))  # without loggers
    assert Watched.copies == 2


def test_a_figure_of_plotly_is_a_page_for_the_loggers_that_take_it(tmp_path: Path) -> None:
    plotly = pytest.importorskip("plotly.graph_objects")
    figure = plotly.Figure(plotly.Scatter(y=[1, 7, 2]))
    pages: list[Any] = []

    class Taking:
        takes = frozenset({"plotly figure"})

        def log_media(self, values: Any, step: int) -> None:
            pages.append((step, values["curve"].suffix, values["curve"].data.decode()))

        def log_metrics(self, metrics: Any, step: int) -> None: ...

        log_config = close = lambda self, *given: None

    with warned("TensorBoardLogger takes no values of the kind 'plotly figure'"):
        fit(tmp_path, ("tensorboard", Taking()), on_log=lambda run: run.log("curve", Figure(figure)))
    assert [each[:2] for each in pages] == [(2, ".html"), (4, ".html")]
    assert all("</html>" in page and '"y":[1,7,2]' in page for _, _, page in pages)


def taking(kinds: Any, **more: Any) -> Any:  # a Trainer with a logger that takes these kinds
    nothing = {name: lambda *given: None for name in ("log_metrics", "log_config", "close")}
    return lambda: quiet(max_steps=1, loggers=type("Own", (), {**nothing, "takes": kinds, **more})())


def test_values_that_cannot_be_shown_are_refused(tmp_path: Path) -> None:
    def logged(name: str, value: Any) -> Any:
        return lambda: fit(tmp_path, on_step_end=lambda run: run.log(name, value))

    def returned(media: Any, **hooks: Any) -> Any:
        step = lambda self, batch: StepOutput(Regression.training_step(self, batch).loss, media=media)  # noqa: E731
        return lambda: fit(tmp_path, task=variant(training_step=step)(), **hooks)

    assert_refused(
        ConfigError,
        {
            "a batch": (lambda: Image(torch.zeros(2, 3, 4, 4)), "one picture at a time", "[2, 3, 4, 4]"),
            "channels last": (lambda: Image(torch.zeros(5, 6, 3)), "layout='HWC'"),
            "a layout": (lambda: Image(torch.zeros(3, 4, 4), layout="hwc"), "'HWC'"),  # type: ignore[arg-type]
            "axes": (lambda: Figure(type("Axes", (), {"figure": 1})()), "axes.figure"),
            "a row": (lambda: Table(["a", "b"], [[1, 2], [3]]), "row 1 has 1 cells", "a, b"),
            "a path": (lambda: Image("a.png"), "not 'a.png'", "File(path)"),
            "a wave": (lambda: Audio(torch.zeros(2, 8) + 0j, 8000), "not complex numbers"),
            "a folder": (lambda: File("."), "is a folder"),
            "no name": (logged("", 1.0), "a text without control characters, not ''"),
            "a file": (lambda: File("absent"), "no such file"),
            "samples last": (lambda: Audio(torch.zeros(800, 2), 8000), "[channels, samples]"),
            "no rate": (lambda: Audio(torch.zeros(8), 0), "sample_rate"),
            "media without names": (returned([Text("a")]), "takes values by name", "not a list"),
            "a number as media": (returned({"x": 1.0}), "'train/x' of StepOutput(media=...) is a float"),
            "a function of media": (returned({"x": lambda: "a"}), "'train/x'", "is a str", "Text(...)"),
            "media and a value": (
                returned({"loss": Text("a")}),
                "media 'loss' of train",
                "both named 'train/loss'",
            ),
            "media and a hook": (
                returned({"x": Text("a")}, on_step_end=lambda run: run.log("train/x", 1.0)),
                "media 'x' of train",
            ),
            "one picture": (lambda: Video(torch.zeros(3, 4, 4)), "frames"),
            "complex": (lambda: Histogram([1j]).counts, "complex128"),
            "a text": (logged("x", "some"), "Write Text(...)"),
            "a kind": (taking({"images"}), "Own.takes", "did you mean 'image'"),
            "no set": (taking("image"), "a set of kinds"),
            "no method": (taking({"image"}), "no method log_media(values, step)"),
            "a taken name": (logged("train/loss", Text("x")), "both named 'train/loss'"),
        },
    )
