"""The manifest of a planned save holds for a 70B model on thousands of ranks."""

import json
import subprocess
import sys

import pytest

import manifest


def test_what_every_rank_reads_grows_by_a_few_bytes_a_file_and_not_with_the_tensors():
    sizes = {ranks: manifest.measure(ranks, 2, 256) for ranks in (64, 128, 256)}
    first = (sizes[128]["manifest_bytes"] - sizes[64]["manifest_bytes"]) / 64
    second = (sizes[256]["manifest_bytes"] - sizes[128]["manifest_bytes"]) / 128
    assert first < 2 * 120  # a file of each group
    assert abs(second - first) < 10
    wide, deep = (manifest.measure(ranks, 8, 256) for ranks in (64, 256))
    more = wide["manifest_bytes"] - sizes[64]["manifest_bytes"]
    assert deep["manifest_bytes"] - sizes[256]["manifest_bytes"] < more + 1000
    assert more / (wide["tensors"] - sizes[64]["tensors"]) < 80  # a name and two numbers


def test_what_rank_0_sends_does_not_grow_with_the_ranks():
    few, many = (manifest.measure(ranks, 2, 256)["sent_bytes"] for ranks in (64, 512))
    assert many < 1.1 * few


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1024, 4096])
def test_llama_70b_is_planned_and_read_within_bounds(ranks):
    command = [sys.executable, manifest.__file__, "--one", str(ranks)]
    row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
    assert row["tensors"] == 4 * 723
    assert row["manifest_bytes"] < 8 << 20
    assert max(row["plan_seconds"], row["last_rank_plan_seconds"]) < 10
    assert max(row["read_seconds"], row["place_seconds"]) < 1
    assert row["peak_mib"] < 512
    # Its own files and one of what all ranks have alike; the last rank is left without rows of some tensors.
    assert max(row["files_opened"], row["files_opened_by_the_last"]) <= 4
