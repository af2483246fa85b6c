"""The environment of a program that a test starts."""

import os

JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def undisturbed() -> dict[str, str]:  # an environment in which a program is alone, whatever the tests run in
    environment = {name: value for name, value in os.environ.items() if name not in JOB}
    return {**environment, "OMP_NUM_THREADS": "1"}
