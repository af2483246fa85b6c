"""Which launcher started a process, told from its environment alone."""

import pytest

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.launch.environment import ProcessEnvironment, detect, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {key.replace("OMPI_COMM", "MV2_COMM"): value for key, value in OPENMPI.items()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin"}, None),
        (TORCHRUN, ProcessEnvironment("torchrun", 3, 4, 1, 2, "node0", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessEnvironment("torchrun", 0, 1, 0, 1)),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"},  # any that is free
            ProcessEnvironment("torchrun", 0, 1, 0, 1, None, 0),
        ),
        ({"RANK": "1"}, None),  # some other program's variable
        (SLURM, ProcessEnvironment("slurm", 5, 8, 1, 4, "gpu07", 15_000 + (4711 * 31) % 15_000)),
        ({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "5"}, ProcessEnvironment("slurm", 5, 8, 1, 4, "a", 5)),
        ({**SLURM, **TORCHRUN}, ProcessEnvironment("torchrun", 3, 4, 1, 2, "node0", 29500)),
        # A batch script, and an interactive shell with one task: alone, whatever the job has asked for.
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        (OPENMPI, ProcessEnvironment("openmpi", 2, 3, 2, 3, "10.0.0.1", 1234)),
        (MPICH, ProcessEnvironment("mpich", 1, 2, 1, 2, "127.0.0.1", 15_000)),
        ({**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, ProcessEnvironment("mpich", 1, 2, 0, 1)),
        ({**MPICH, "MASTER_PORT": "99"}, ProcessEnvironment("mpich", 1, 2, 1, 2, "127.0.0.1", 99)),
        ({**MPICH, "PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        (MVAPICH, ProcessEnvironment("mvapich", 2, 3, 2, 3, "10.0.0.1", 1234)),
    ],
)
def test_a_launcher_is_known_by_its_variables(environment, expected):
    assert detect(environment) == expected


def test_the_number_of_machines_follows():
    assert detect(TORCHRUN).num_nodes == 2
    assert detect(OPENMPI).num_nodes == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**TORCHRUN, "RANK": "4"}, r"rank 4 of 4.*are inconsistent\. Unset"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' in the environment is not a number"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment is not a number"),
        ({**TORCHRUN, "WORLD_SIZE": "-1"}, "is not a number"),
        ({key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"}, "SLURM_LOCALID is not in"),
        ({**TORCHRUN, "MASTER_PORT": "abc"}, "MASTER_PORT='abc' in the environment is not a number"),
        (
            {**TORCHRUN, "MASTER_PORT": "0"},
            r"MASTER_PORT=0 in the environment is not a valid port\. Set it to",
        ),
        ({**SLURM, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 in the environment is not a valid port"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not in its environment"),
    ],
)
def test_what_makes_no_sense_is_refused(environment, message):
    with pytest.raises(StrategyError, match=message):
        detect(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[3]", "gpu3"),
        ("rack[1-2]-node,other", "rack1-node"),
        ("a-b.example.org,c", "a-b.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_mpi_jobs_on_one_machine_do_not_meet() -> None:
    ports = [detect({**MPICH, "PMIX_NAMESPACE": f"prterun-host-{job}@1"}).port for job in range(5)]
    assert len(set(ports)) == 5
