"""The campaign notices what is wrong, says how to repeat it, and is one command."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.campaigns.checkpoints import Score, main, run_campaign
from tests.campaigns.trials import Case, run_case
from tests.support.fault_kinds import Fault
from tests.support.faults import read_bytes, write_bytes
from tests.support.memory import MemoryDisk

ROOT = Path(__file__).resolve().parents[2]


def test_a_trial_is_told_as_a_text_that_makes_it_again():
    case = Case("disk", "background", (Fault(17, "power cut", 3), Fault(5, "kill", 0)))
    assert str(case) == "disk/background/17:power cut:3/5:kill:0"
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize(
    "text", ["disk", "tape/background/1:kill:0", "disk/background/1:murder:0", "disk/x/y"]
)
def test_a_text_that_is_no_trial_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"is no trial; one looks like 'disk/background/17:power cut:3'"):
        Case.parse(text)


class Hoarder(MemoryDisk):
    """Deletes nothing."""

    def delete(self, path):
        pass


class Swapper(MemoryDisk):
    """Keeps the second checkpoint's name, with the content of the first: every hash in it is right."""

    def rename(self, old, new):
        if new.endswith("update-00000002"):
            for name in self.entries(old):
                self.delete(f"{old}/{name}")
                write_bytes(self, f"{old}/{name}", read_bytes(self, f"/trial/update-00000001/{name}"))
        super().rename(old, new)


@pytest.mark.parametrize(
    ("files", "complaint"), [(Hoarder(), "was left behind"), (Swapper(), "update 2 was saved, and is lost")]
)
def test_a_bad_disk_is_found_out(files, complaint):
    outcome = run_case(Case("disk", "foreground", (Fault(55, "kill", 0),)), "/trial", files)
    assert not outcome.is_good
    score = Score()
    score.add(outcome)
    text = str(score)
    assert "FAILED: disk/foreground/55:kill:0" in text
    assert text.endswith("failures: 1")
    assert complaint in text


def test_the_same_seed_gives_the_same_campaign():
    first, second, other = (run_campaign(40, seed, "/campaign", ("objects",)) for seed in (5, 5, 6))
    assert str(first) == str(second)
    assert str(first) != str(other)


def test_the_command_prints_its_score(tmp_path, capsys):
    arguments = ["--faults", "25", "--kills", "1", "--shards", "0", "--directory", str(tmp_path)]
    assert main([*arguments, "--remote"]) == 0
    printed = capsys.readouterr().out
    assert "SIGKILL" in printed
    assert "wrong bytes: 0" in printed
    assert printed.endswith("failures: 0\n")
    assert list(tmp_path.iterdir()) == []
    assert main([*arguments, "--trial", "disk/background/30:flip:1"]) == 0
    assert "trials: 1;" in capsys.readouterr().out


def test_it_runs_as_a_module_from_the_root_of_the_repository():
    command = [sys.executable, "-m", "tests.campaigns.checkpoints", "--trial", "disk/tape"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "is no trial; one looks like" in done.stderr
