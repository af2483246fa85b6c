"""`drivetrain.search`: its space, its result, trials that fail or are pruned, and what it refuses."""

import json
import logging
import re

import pytest
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant

import drivetrain
from drivetrain import ConfigError, DrivetrainError, LambdaCallback, OptimizerConfig
from drivetrain.cli.main import main

optuna = pytest.importorskip("optuna", reason="the extra search is not installed")

from drivetrain.integrations.optuna import SearchResult, TrialResult  # noqa: E402
from drivetrain.integrations.optuna.sampling import SeededSampler  # noqa: E402
from drivetrain.integrations.optuna.space import Space, read_range  # noqa: E402

DATA = (pairs(8), pairs(8))
RATES = {"lr": (1e-3, 0.5, "log")}


def line(parameters):
    return Regression(OptimizerConfig("sgd", lr=parameters["lr"]))


def search(make_task, space, run_dir, trials=3, checkpoint=True, trainer=(), **options):
    made = quiet(max_epochs=1, run_dir=run_dir, checkpoint=checkpoint, **dict(trainer))
    return drivetrain.search(make_task, DATA, space, trainer=made, trials=trials, **options)


def test_the_best_trial_comes_back_with_its_weights_and_trainer_and_a_search_goes_on(tmp_path, monkeypatch):
    made, levels = [], set()
    monkeypatch.setattr(logging.getLogger("optuna"), "level", logging.INFO)

    def make_task(parameters):
        made.append(parameters)
        levels.add(optuna.logging.get_verbosity())
        return line(parameters), {"max_grad_norm": parameters["clip"]}

    space = {**RATES, "clip": [0.5, 5.0]}
    result = search(make_task, space, tmp_path, trials=2)
    result = search(make_task, space, tmp_path, trials=4, storage=tmp_path / "journal.log")
    assert len(made) == 4
    assert levels == {logging.WARNING}
    assert optuna.logging.get_verbosity() == logging.INFO
    best = result.best
    assert best.trial.values["validation/loss"] == min(
        each.values["validation/loss"] for each in result.trials
    )
    assert quiet().validate(best.task, pairs(8)) == best.trial.values
    assert best.trainer.max_grad_norm == best.trial.parameters["clip"]
    assert best.task.optimizer.lr == best.trial.parameters["lr"]
    assert result.restore(3).trial.run_dir == tmp_path / "trial-0003"
    with open(tmp_path / "journal.log", "ab") as journal:  # a process was killed while it wrote a line
        journal.write(b'{"op_code":')
    assert len(search(make_task, space, tmp_path, trials=5).trials) == 5
    told = r"lr: was 0.001 to 0.5 \(log\), is 1 to 9 \(step 2\); clip: was one of 0.5, 5.0, is nothing"
    with pytest.raises(ConfigError, match=told):
        search(make_task, {"lr": (1, 9, 2)}, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match=f"belongs to the run_dir {tmp_path}, "):
        search(make_task, space, tmp_path / "elsewhere", storage=tmp_path / "journal.log")
    with pytest.raises(ConfigError, match="is the run_dir of another search: 'search' in "):
        search(make_task, space, tmp_path, storage=tmp_path / "another.log")
    with pytest.raises(ConfigError, match="whole number, at least 0, not '3'"):
        result.restore("3")


def test_a_space_has_ranges_choices_distributions_or_is_a_function_of_the_trial(tmp_path):
    given = {"a": (1, 9, "log"), "b": (0, 100, 10), "c": (0.0, 1), "d": ["x", None]}
    given["e"] = optuna.distributions.FloatDistribution(0.0, 1.0, step=0.5)
    found = {name: json.loads(each) for name, each in Space(given).to_json().items()}
    assert [each["name"][:3] for each in found.values()] == ["Int", "Int", "Flo", "Cat", "Flo"]
    assert (found["a"]["attributes"]["log"], found["b"]["attributes"]["step"]) == (True, 10)
    assert read_range("1e-5:1:log") == (1e-5, 1, "log")
    assert read_range("64,true,a") == [64, True, "a"]
    with pytest.raises(ConfigError, match="must be 'log' or a step, not 'lgo'"):
        read_range("1e-5:1:lgo")

    def space(trial):
        return {"lr": 10.0 ** -trial.suggest_int("exponent", 1, 2)}

    result = search(line, space, tmp_path, trials=5, sampler="grid")
    assert sorted(each.parameters["lr"] for each in result.trials) == [0.01, 0.1]  # then all are tried
    assert result.best.task.optimizer.lr == result.best.trial.parameters["lr"]


def test_a_trial_that_fails_is_recorded_and_the_search_goes_on(tmp_path):
    def make_task(parameters):
        if parameters["kind"] == "raises":
            raise MemoryError("no room")
        kind = variant(loss=lambda self, outputs, batch: outputs.sum() * float("nan"))
        return kind() if parameters["kind"] == "nan" else Regression()

    with warned("trial . failed: (MemoryError: no room|NonFiniteError)"):
        result = search(make_task, {"kind": ["raises", "nan", "good"]}, tmp_path, sampler="grid")
    found = {each.parameters["kind"]: each for each in result.trials}
    assert found["raises"].failure.startswith("MemoryError: no room (test_search.py:")
    assert "NaN or infinite at step 0" in found["nan"].failure
    assert result.best.trial is found["good"]
    assert "<td" in result._repr_html_()
    assert len(result.plot().axes) == 2


def test_an_error_of_all_trials_ends_the_search_and_one_with_nothing_left_says_so(tmp_path, caplog):
    def wrong(parameters):
        raise KeyError("l")

    with warned(), pytest.raises(ConfigError, match=r"the first trials all failed.* trial 2: KeyError: 'l'"):
        search(wrong, RATES, tmp_path, trials=9)
    result = search(line, RATES, tmp_path, trials=3)
    assert [each.state for each in result.trials] == ["failed", "failed", "complete"]
    search(line, RATES, tmp_path, trials=3)
    assert "all 3 trials of this search ended before this start, 2 of them" in caplog.text
    with (
        warned(),
        pytest.raises(DrivetrainError, match=r"of the 1 trials is complete\. Trial 0 failed: KeyE"),
    ):
        search(wrong, RATES, tmp_path / "other", trials=1)
    with pytest.raises(
        DrivetrainError, match=r"so none was run\. .* None is complete\. Trial 0 failed: KeyE"
    ):
        search(wrong, RATES, tmp_path / "other", trials=1)


def test_the_last_words_of_an_interrupted_search_say_how_it_goes_on(tmp_path):
    def interrupt(run):
        raise KeyboardInterrupt

    saving = drivetrain.CheckpointConfig(every="1 step")
    for make_task, watch in ((line, [LambdaCallback(on_step_end=interrupt)]), (interrupt, [])):
        with pytest.raises(KeyboardInterrupt) as found:
            search(make_task, RATES, tmp_path, checkpoint=saving, trainer={"callbacks": watch})
        notes = "\n".join(found.value.__notes__)
        assert notes.endswith(f"start the same search again, which goes on in {tmp_path}")
        assert "resume=" not in notes


def test_several_objectives_have_a_pareto_front(tmp_path):
    names = ["validation/loss", "train/loss"]
    result = search(line, RATES, tmp_path, objective=names, trainer={"log_every": 1}, checkpoint=False)
    values = [tuple(each.values[name] for name in names) for each in result.trials]
    best = [n for n, (a, b) in enumerate(values) if not any(c < a and d < b for c, d in values)]
    assert [each.number for each in result.pareto] == best
    assert len(best) < 3
    with pytest.raises(ConfigError, match=r"choose one of result\.pareto"):
        _ = result.best
    with pytest.raises(ConfigError, match="checkpoint=False keeps no weights"):
        result.restore(0)


def test_a_search_is_a_table_of_the_best_a_frame_and_a_figure(tmp_path):
    def trial(number):
        parameters = {"lr": 10.0**-number, "steps": None if number % 2 else "<b>"}
        loss = {} if number == 3 else {"validation/loss": abs(number - 7.5)}
        return TrialResult(number, "complete" if loss else "failed", parameters, loss, tmp_path, steps=5)

    trials = tuple(map(trial, range(12)))
    result = SearchResult(trials, ("validation/loss",), ("maximize",), tmp_path, trials[:1], trial)
    frame = result.to_pandas()
    assert frame["lr"].tolist() == [each.parameters["lr"] for each in trials]
    assert (frame["steps"].tolist(), frame["parameter.steps"][0]) == ([5] * 12, "<b>")
    assert frame["validation/loss"].isna().tolist() == [each.state == "failed" for each in trials]
    shown = result._repr_html_()
    numbers = re.findall('<tr><td style="text-align:left">([0-9]+)<', shown)
    assert numbers == ["0", "1", "2", "4", "11", "5", "10", "6", "9", "7"]
    assert ("<b>" in shown, shown.count("<svg")) == (False, 1)
    values, rates, steps = result.plot().axes
    assert values.lines[1].get_ydata().tolist() == [7.5] * 11
    assert (rates.get_xscale(), steps.get_xscale()) == ("log", "linear")
    with pytest.raises(ConfigError, match="no trial has a parameter 'rate'"):
        result.plot("rate")


def prune(run_dir):
    ends = []
    watch = LambdaCallback(on_fit_end=lambda run: ends.append((run.progress.steps, run.stop_reason)))
    settings = {"validate_every": "1 step", "callbacks": [watch], "strategy": "ddp", "devices": 2}
    options = {"pruner": optuna.pruners.ThresholdPruner(upper=5.0, n_warmup_steps=1000), "sampler": "grid"}
    found = search(line, {"lr": [1e-6, 0.1]}, run_dir, 2, trainer=settings, **options)
    return ends, [(each.state, each.steps) for each in found.trials]


def test_a_pruned_trial_ends_on_both_ranks_in_the_same_step(tmp_path):
    first, second = on_two_ranks(prune, tmp_path)
    assert first == second
    assert sorted(first[0]) == [(2, "max_epochs=1 reached"), (2, "pruned after step 2")]


def test_pruners_compare_trials_of_other_batch_sizes_at_the_same_part_of_an_epoch(tmp_path):
    curve = LambdaCallback(on_evaluation_end=lambda run: run.log("curve", 1 / (1 + run.progress.epoch)))
    result = drivetrain.search(
        lambda parameters: Regression(),
        lambda parameters: (pairs(19, parameters["size"], drop_last=True), pairs(2)),
        {"size": [8, 3]},
        trainer=quiet(max_epochs=4, run_dir=tmp_path, callbacks=[curve]),
        objective="curve",
        direction="minimize",
        sampler="grid",
        trials=2,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
    )
    assert [each.state for each in result.trials] == ["complete", "complete"]


def test_a_draw_depends_on_the_seed_the_trial_and_the_name_alone():
    space = Space({"a": (0.0, 1.0), "b": (0.0, 1.0)})

    def study(storage):
        sampler = SeededSampler(lambda seed: optuna.samplers.RandomSampler(seed=seed), 3)
        return optuna.create_study(study_name="s", storage=storage, sampler=sampler, load_if_exists=True)

    whole = study(None)
    both = [space.suggest(whole.ask()) for _ in range(2)]
    storage = optuna.storages.InMemoryStorage()
    study(storage).ask()
    study(storage).ask().suggest_float("a", 0.0, 1.0)  # and is killed
    again = study(storage)
    number = storage.get_trial_id_from_study_id_trial_number(storage.get_study_id_from_name("s"), 1)
    assert space.suggest(optuna.Trial(again, number)) == both[1]
    assert len({*both[0].values(), *both[1].values()}) == 4


def test_mistakes_are_refused_before_a_trial_or_end_the_search(tmp_path):
    def run(make_task=line, space=RATES, **options):
        return lambda: search(make_task, space, tmp_path / str(id(options)), **options)

    shared = Regression()

    def around(parameters):
        task = Regression()
        task.line = shared.line
        return task

    (tmp_path / "notes.txt").write_text("no journal", encoding="utf-8")
    memory, in_one = optuna.storages.InMemoryStorage(), drivetrain.CheckpointConfig(directory=tmp_path)
    several = ["validation/loss", "train/loss"]
    rows = {
        "an empty space": (run(space={}), "name at least one parameter"),
        "a value": (run(space={"lr": 0.1}), "must be a range", "[0.1]"),
        "a logarithm of zero": (run(space={"lr": (0.0, 1.0, "log")}), "is not possible"),
        "a range as a list": (run(space={"lr": [1e-3, 0.5, "log"]}), "means choices"),
        "no end": (run(space={"lr": (0.0, float("inf"))}), "must be finite"),
        "choices that are equal": (run(space={"lr": [1, True]}), "True twice, or a value equal to it"),
        "an object": (run(space={"lr": [object()]}), "Give their names"),
        "no task": (run(lambda parameters: 3), "must return a TaskModule"),
        "a run_dir": (run(lambda parameters: (line(parameters), {"run_dir": "x"})), "directory itself"),
        "a trained model": (run(around), "that an earlier trial has trained"),
        "no argument": (run(lambda parameters: (line(parameters), {"bach_size": 4})), "mean 'batch_size'"),
        "a wrong name": (run(objective="test/loss"), "the search optimises 'test/loss'", "validation/loss"),
        "an unknown direction": (run(objective="validation/score"), "give direction='maximize'"),
        "two directions": (run(direction=["min", "max"]), "have 2 directions"),
        "a wrong sampler": (run(sampler="tpee"), "Did you mean 'tpe'"),
        "a grid without end": (run(sampler="grid"), "has infinitely many. Give it a step"),
        "a wrong pruner": (run(pruner="medan"), "Did you mean 'median'"),
        "a pruner of two": (run(pruner="median", objective=several), "Optuna prunes by one"),
        "a trial": (run(trainer={"dry_run": True}), "dry_run, which writes nothing"),
        "one directory": (run(checkpoint=in_one), "would hold the checkpoints of all"),
        "a storage of one process": (run(parallel=2, storage=memory), "each of them can open"),
        "an unknown storage": (run(storage="nothing://here"), "cannot be opened"),
        "a directory as a journal": (run(storage=tmp_path), "cannot be opened"),
        "another file as a journal": (run(storage=tmp_path / "notes.txt"), "cannot be opened"),
    }
    assert_refused(ConfigError, rows)


PROGRAM = """
from tests.support.tasks import Regression, pairs
from drivetrain import OptimizerConfig

class Line(Regression):
    def __init__(self, lr: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__(OptimizerConfig("sgd", lr=lr), dropout)

class Data:
    def __init__(self, count: int = 8) -> None:
        self.count = count
    def train_data(self):
        return pairs(self.count)
    def validation_data(self):
        return pairs(8)
"""
CONFIG = """
task: searched_line.Line
data: searched_line.Data
trainer: {max_epochs: 1, progress_bar: false, loggers: [csv], strategy: cpu, run_dir: found}
space: {task: {lr: "1e-3:0.5:log", dropout: [0.0, 1e-1]}, data.count: "4,8"}
trials: 2
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "searched_line.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "search.yaml").write_text(CONFIG, encoding="utf-8")
    return ["search", "--config", "search.yaml", "--space.trainer.max_grad_norm", "0.5:2.0"]


def test_the_command_searches_by_a_file_and_options_and_shows_what_it_found(tmp_path, words, capsys, caplog):
    assert main([*words, "--trials", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["trials"]) == 3
    assert "curves: " not in caplog.text
    names = {"task.lr", "task.dropout", "data.count", "trainer.max_grad_norm"}
    given = found["trials"][0]["parameters"]
    assert given.keys() == names
    assert given["task.dropout"] in (0.0, 0.1)
    record = json.loads((tmp_path / "found" / "trial-0000" / "config.json").read_text(encoding="utf-8"))
    assert record["trainer"]["max_grad_norm"] == given["trainer.max_grad_norm"]
    assert main(["search", "show", "found", "--html", "new/page.html"]) == 0
    out = capsys.readouterr().out
    assert f"* {found['best'][0]}" in out
    assert "importance for validation/loss" in out
    assert "\nnew/page.html: 3 runs" in out
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    (shown,) = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["searches"]
    assert (shown["best"], [each["run"] for each in shown["trials"]]) == (found["best"], [0, 1, 2])
    assert shown["importances"]["validation/loss"].keys() == shown["parameters"].keys() == names
    assert main(["runs", "list", "found"]) == 0
    told = (
        rf"found: a search +trial {found['best'][0]}: validation/loss .* 3 complete *(\n  trial-000.*){{3}}"
    )
    assert re.search(told, capsys.readouterr().out)
    assert main(["search", "show", "found", "--html", "search.yaml/page.html"]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["search", "show", "."]) == 2
    assert "is not the directory of a search" in capsys.readouterr().err


def test_the_command_refuses_what_no_trial_could_use_before_the_search_begins(tmp_path, words, capsys):
    refused = {
        "--space.task.lr 1:0": "LOW:HIGH:log or LOW:HIGH:STEP",
        "--space.trainer.run_dir a,b": "each trial has a directory of its own",
        "--space.data.count 4,x": "'x'",
        "--space.task.drop 1,2": "Did you mean 'dropout'",
    }
    for option, told in refused.items():
        assert main([*words, *option.split()]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "found").exists()
