"""Random streams are functions of where the run is, and nothing else moves them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.checkpoint import pack, unpack
from drivetrain.core import random_streams as streams
from drivetrain.core.random_streams import (
    BATCHES,
    HostDraws,
    Streams,
    batch_stream,
    host_state,
    load_host_state,
    mix,
    mix_next,
    preserved,
    seed_batch,
    seed_host,
    shielded,
)

LOW = (1 << 32) - 1  # what torch's CPU generator reads of a seed


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    with preserved():
        yield


def drawn() -> tuple[float, float, float]:
    """The next draw of each of the host's generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def peeked() -> tuple[float, float, float]:
    with preserved():
        return drawn()


def disturb() -> None:
    random.random()
    np.random.randn(3)  # an odd number, which leaves a cached normal value behind
    torch.rand(5)
    random.gauss(0, 1)


def test_seeds_never_change_because_resumed_runs_depend_on_them() -> None:
    # The first output of SplitMix64 from the seed 0, as its authors' implementation gives it.
    assert mix(0) == 0xE220A8397B1DCDAF & (1 << 63) - 1
    assert [mix(1), mix(1, 2), mix(1, 2, 3)] == [
        7960286522194355700,
        8829160048997669727,
        8058178252673074585,
    ]
    assert mix_next(batch_stream(42, 3), 128) == 4505572615134819938
    stream = Streams(seed=42, rank=1)
    stream.seed_update(1000)
    assert torch.initial_seed() == 5473434677674114338
    stream.seed_evaluation(7)
    assert torch.initial_seed() == 6063523532163842417


def test_a_seed_depends_on_every_key_and_on_their_order() -> None:
    keys = [(), (0,), (0, 0), (1,), (1, 0), (0, 1), (1, 2), (2, 1), (1, 2, 0), (-1,), (1 << 40, 3)]
    assert len({mix(*each) for each in keys[1:]}) == len(keys) - 1
    assert all(0 <= mix(*each) < 1 << 63 for each in keys)


def test_the_streams_of_one_seed_are_unrelated() -> None:
    kinds = [streams.UPDATES, streams.BATCHES, streams.ORDER, streams.EVALUATION, streams.HOST]
    seeds = {
        mix(kind, seed, position) & LOW for kind in kinds for seed in range(4) for position in range(500)
    }
    assert len(seeds) == 5 * 4 * 500


def seed_of(stream: Streams, update: int) -> int:
    stream.seed_update(update)
    return torch.initial_seed()


def test_no_two_updates_share_a_seed_in_the_bits_that_generators_read() -> None:
    stream = Streams(seed=3)
    seeds = [seed_of(stream, update) for update in range(20_000)]
    assert len({seed & LOW for seed in seeds}) == len(seeds)
    assert seed_of(stream, 1 << 31) & LOW not in {seed & LOW for seed in seeds}


@pytest.mark.parametrize("other", [{"seed": 4}, {"seed": 3, "rank": 1}], ids=["seed", "rank"])
def test_another_seed_or_rank_draws_otherwise(other: dict[str, int]) -> None:
    first, second = Streams(seed=3), Streams(**other)
    assert not {seed_of(first, u) for u in range(1000)} & {seed_of(second, u) for u in range(1000)}


def test_an_update_draws_the_same_whatever_ran_before() -> None:
    stream = Streams(seed=3)
    stream.seed_update(5)
    expected = torch.rand(4)
    disturb()
    stream.seed_evaluation(0)
    torch.rand(9)
    stream.seed_update(5)
    assert torch.equal(torch.rand(4), expected)
    stream.seed_update(6)
    assert not torch.equal(torch.rand(4), expected)


def test_every_evaluation_draws_the_same_and_not_what_an_update_draws() -> None:
    stream = Streams(seed=3)
    stream.seed_evaluation(5)
    expected = torch.rand(4)
    stream.seed_update(5)
    assert not torch.equal(torch.rand(4), expected)
    stream.seed_evaluation(5)
    assert torch.equal(torch.rand(4), expected)


def test_an_update_leaves_the_host_streams_of_the_step_alone() -> None:
    stream = Streams(seed=3)
    stream.start()
    python, legacy, _ = peeked()
    stream.seed_update(0)
    stream.seed_evaluation(0)
    assert drawn()[:2] == (python, legacy)


def test_a_run_begins_alike_whatever_its_process_did_before() -> None:
    Streams(seed=3).start()
    expected = drawn()
    disturb()
    Streams(seed=3).start()
    assert drawn() == expected
    Streams(seed=4).start()
    assert all(new != old for new, old in zip(drawn(), expected, strict=True))


def test_a_batch_is_drawn_from_its_own_place() -> None:
    draws = {}
    for epoch in range(3):
        for position in range(0, 40, 4):
            seed_batch(seed=1, epoch=epoch, position=position)
            draws[epoch, position] = drawn()
            disturb()
    for kind in range(3):
        assert len({each[kind] for each in draws.values()}) == len(draws)
    seed_batch(seed=1, epoch=2, position=8)
    assert drawn() == draws[2, 8]


def test_the_seeds_of_an_epoch_are_those_of_mix() -> None:
    stream = batch_stream(9, 2)
    assert [mix_next(stream, position) for position in range(5)] == [
        mix(BATCHES, 9, 2, position) for position in range(5)
    ]


def test_draws_are_noticed_and_can_be_gone_on_from_elsewhere() -> None:
    seed_host(3)
    before = HostDraws()
    assert before.if_moved() is None
    torch.rand(3)  # torch's generator is seeded for every update and needs no note
    assert before.if_moved() is None
    for draw in (random.random, np.random.rand):
        seed_host(3)
        draw()
        moved = before.if_moved()
        assert moved is not None
        expected = (random.random(), np.random.rand())
        seed_host(4)
        moved.restore()
        assert (random.random(), np.random.rand()) == expected


def test_preserved_leaves_every_generator_as_it_was() -> None:
    np.random.randn()  # leaves a cached value behind
    expected = peeked()
    with preserved(torch.device("cpu")):
        seed_host(1)
        disturb()
    assert peeked() == expected


@pytest.mark.parametrize("shield", [preserved, shielded])
def test_generators_are_given_back_also_after_an_error(shield: Callable[[], Any]) -> None:
    expected = peeked()[:2]

    def interrupted() -> None:
        with shield():
            disturb()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert peeked()[:2] == expected


def test_shielded_leaves_the_host_streams_of_the_step_as_they_were() -> None:
    random.gauss(0, 1)
    np.random.randn()
    with preserved():
        expected = [(random.gauss(0, 1), np.random.randn()) for _ in range(3)]
    with shielded():
        seed_host(1)
        disturb()
    assert [(random.gauss(0, 1), np.random.randn()) for _ in range(3)] == expected


def test_the_host_streams_go_on_from_a_checkpoint() -> None:
    random.gauss(0, 1)  # both have now a cached value
    np.random.randn()
    stored = pack(host_state())
    expected = [
        (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()) for _ in range(700)
    ]
    seed_host(5)
    load_host_state(unpack(*stored))  # type: ignore[arg-type]
    assert [
        (random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()) for _ in range(700)
    ] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_draws_from_the_update_too() -> None:
    device = torch.device("cuda", 0)
    stream = Streams(seed=3, device=device)
    stream.seed_update(5)
    expected = torch.rand(4, device=device)
    torch.rand(9, device=device)
    with preserved(device):
        stream.seed_update(5)
        assert torch.equal(torch.rand(4, device=device), expected)
