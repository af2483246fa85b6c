"""Which launcher started a process, told from its environment alone."""

import zlib
from dataclasses import replace

from tests.support.refusals import assert_refused

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.launch.environment import ProcessEnvironment, detect, first_host


def environment(names: str, *values: object) -> dict[str, str]:
    return dict(zip(names.split(), map(str, values), strict=True))


NAMES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
TORCHRUN = environment(NAMES, 3, 4, 1, 2, "node0", 29500)
SLURM = environment(
    "SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES SLURM_LOCALID"
    " SLURM_STEP_NODELIST",
    *(4711, 2, 5, 7, 2, 1, "gpu[07-08]"),
)
OPENMPI = environment(
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"
    " MASTER_ADDR MASTER_PORT",
    *(2, 3, 2, 3, "10.0.0.1", 1234),
)
MPICH = environment("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS PMI_PORT", 1, 2, 1, 2, "a")
MVAPICH = environment(" ".join(OPENMPI).replace("OMPI", "MV2").partition(" MASTER")[0], 2, 3, 0, 2)


def test_a_launcher_is_known_by_its_variables() -> None:
    for variables, launcher, *fields in (
        (TORCHRUN, "torchrun", 3, 4, 1, 2, "node0", 29500),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", 0, 1, 0, 1),
        (SLURM, "slurm", 5, 7, 1, 4, "gpu07", 15_000 + (4711 * 31 + 2) % 15_000),
        ({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "5"}, "slurm", 5, 7, 1, 4, "a", 5),
        ({**SLURM, **TORCHRUN}, "torchrun", 3, 4, 1, 2, "node0", 29500),
        (OPENMPI, "openmpi", 2, 3, 2, 3, "10.0.0.1", 1234),
        (MPICH, "mpich", 1, 2, 1, 2, "127.0.0.1", 15_000 + zlib.crc32(b"a") % 15_000),
        (MVAPICH, "mvapich", 2, 3, 0, 2),
    ):
        found = detect(variables)
        expected = ProcessEnvironment(launcher, *fields)  # type: ignore[arg-type]
        assert found == replace(expected, one_machine=launcher in ("openmpi", "mpich"))
    assert [getattr(detect(each), "num_nodes", None) for each in (SLURM, OPENMPI)] == [2, 1]


def test_a_process_alone_has_no_launcher() -> None:
    alone = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for variables in (
        {},
        {"PATH": "/bin"},
        {"RANK": "1"},  # some other program's variable
        # A batch script, and an interactive shell with one task: alone, whatever the job has asked for.
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        alone,
        {**MPICH, "PMI_SIZE": "1", "PMI_RANK": "0"},
    ):
        assert detect(variables) is None, variables


def test_refusals() -> None:
    cases = {
        "a rank too many": ({**TORCHRUN, "RANK": "4"}, "rank 4 of 4", "Unset"),
        "a local rank too many": ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2"),
        "a word": ({**TORCHRUN, "RANK": "one"}, "RANK='one'", "not a number"),
        "a local rank over the rank": ({**TORCHRUN, "RANK": "0"}, "rank 0 of 4, local rank 1 of 2"),
        "a port that is too high": ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        "a port that nobody knows": ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0", "Set it to"),
        "half of Slurm": ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID"),
    }
    rows = {name: (lambda each=each: detect(each), *words) for name, (each, *words) in cases.items()}
    assert_refused(StrategyError, rows)


def test_the_first_host_of_a_list() -> None:
    hosts = {
        "node1": "node1",
        "node1,node2": "node1",
        "gpu[03-05,9],login1": "gpu03",
        "gpu[3]": "gpu3",
        "rack[1-2]-node,other": "rack1-node",
        "a-b.example.org,c": "a-b.example.org",
    }
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts
