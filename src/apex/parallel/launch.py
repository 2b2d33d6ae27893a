"""Which process of a job this is, by the environment variables of the launcher that started it.

Each launcher tells its processes four numbers, in variables of its own: rank, local rank, world
size and local world size.

* torchrun: ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``
* mpirun of Open MPI: ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_LOCAL_RANK``,
  ``OMPI_COMM_WORLD_SIZE``, ``OMPI_COMM_WORLD_LOCAL_SIZE``
* mpirun of MPICH and Intel MPI: ``PMI_RANK``, ``MPI_LOCALRANKID``, ``PMI_SIZE``,
  ``MPI_LOCALNRANKS``
* srun of SLURM: ``SLURM_PROCID``, ``SLURM_LOCALID``, ``SLURM_STEP_NUM_TASKS``,
  ``SLURM_STEP_TASKS_PER_NODE``

The first of these that is complete counts: srun may start mpirun or torchrun, seldom the other way
round, so the launcher nearest to the process stands above the others.

SLURM sets variables where it started no process of a job, too. An ``salloc`` shell has
``SLURM_NTASKS``, and a batch script ``SLURM_PROCID=0`` in addition: one process runs there,
whatever was allocated. What only srun sets is ``SLURM_STEP_ID``, so without it the variables of a
job are not read. An interactive shell on a node of the allocation is a step of one task, which
``SLURM_STEP_NUM_TASKS`` says, while ``SLURM_NTASKS`` is that of the job. Seen with SLURM 22.05.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["DEFAULT_PORT", "Environment", "environment", "master_address"]

DEFAULT_PORT = 29500  # torchrun's

_VARIABLES = {  # in the order of the fields of Environment
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
}
# srun sets the first of each. The others are for programs that imitate srun with fewer variables.
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_SLURM_LOCAL_SIZES = (
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)


class Environment(NamedTuple):
    """Where this process stands in its job.

    Attributes:
        rank: 0 to ``world_size - 1``.
        local_rank: 0 to ``local_world_size - 1``: the number among the processes of this machine.
        world_size: How many processes the job has.
        local_world_size: How many of them run on this machine.
        launcher: Whose variables were read: "torchrun", "Open MPI", "MPICH", "SLURM" or "none".
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str


def environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Find rank and world size; without a launcher, rank 0 of 1.

    Args:
        variables: The environment variables.

    Raises:
        ValueError: The variables are incomplete, are no whole numbers or contradict each other.
            The text names them.

    Example::

        >>> environment({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
        ...              "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
        Environment(rank=3, local_rank=1, world_size=4, local_world_size=2, launcher='SLURM')
        >>> environment({})
        Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher='none')
    """
    found, incomplete = None, []
    if variables.get("WORLD_SIZE") == "1" and "RANK" in variables:  # enough for torch's env://
        variables = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **variables}
    for launcher, names in _VARIABLES.items():
        if all(name in variables for name in names):
            rank, local_rank, world, local_world = (_whole(variables, name) for name in names)
            found = Environment(rank, local_rank, world, local_world, launcher)
            _check(found, variables, names)
            break
        incomplete.append(names)
    found = found or _slurm(variables)
    for names in incomplete:
        _check_incomplete(variables, names, found)
    return found or Environment(0, 0, 1, 1, "none")


def master_address(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Find the address and port at which the processes of the job meet.

    The address is ``MASTER_ADDR``; without it, 127.0.0.1 for a job on one machine, and the first
    host of SLURM's list for a job on several, because rank 0 runs there.

    The port is ``MASTER_PORT``; without it, 29500, and in a SLURM job 20000 plus the last four
    digits of the job's id, because several jobs may share a machine. Set it where two programs of
    one job train at the same time on the same machine.

    Args:
        variables: The environment variables.

    Raises:
        ValueError: As for :func:`environment`; or ``MASTER_PORT`` is no port; or the job runs on
            several machines and the variables do not say where rank 0 is.

    Example::

        >>> master_address({"MASTER_ADDR": "10.0.0.7"})
        ('10.0.0.7', 29500)
    """
    return _address(variables), _port(variables)


def _address(variables: Mapping[str, str]) -> str:
    if "MASTER_ADDR" in variables:
        return variables["MASTER_ADDR"]
    here = environment(variables)
    if here.local_world_size == here.world_size:
        return "127.0.0.1"
    # mpirun starts its helpers by srun on all machines but its own: the step's list lacks that one.
    names = ("SLURM_STEP_NODELIST",) if here.launcher == "SLURM" else ()
    for name in (*names, "SLURM_JOB_NODELIST"):
        if variables.get(name):
            return _first_host(variables[name])
    raise ValueError(
        f"MASTER_ADDR is not set, and the {here.world_size} processes run on several machines "
        f"({here.local_world_size} on this one): set it to the address of the machine of rank 0"
    )


def _port(variables: Mapping[str, str]) -> int:
    if "MASTER_PORT" in variables:
        port = _whole(variables, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise ValueError(f"MASTER_PORT={port} is no port: set it to a number from 1 to 65535")
        return port
    if "SLURM_JOB_ID" in variables:
        return 20000 + _whole(variables, "SLURM_JOB_ID") % 10000
    return DEFAULT_PORT


def _slurm(variables: Mapping[str, str]) -> Environment | None:
    """Read the variables of srun; None where srun did not start this process."""
    if "SLURM_PROCID" not in variables:
        return None
    if "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables:
        if _whole(variables, "SLURM_PROCID") != 0:
            raise ValueError(
                f"SLURM_PROCID={variables['SLURM_PROCID']} without SLURM_STEP_ID: a batch script "
                "has rank 0, and srun sets both; start the processes of the job by srun"
            )
        return None
    size = next((name for name in _SLURM_SIZES if name in variables), _SLURM_SIZES[0])
    local = next((name for name in _SLURM_LOCAL_SIZES if name in variables), _SLURM_LOCAL_SIZES[0])
    names = ("SLURM_PROCID", "SLURM_LOCALID", size, local)
    if not all(name in variables for name in names):
        _check_incomplete(variables, names, None)
    rank, local_rank, world = (_whole(variables, name) for name in names[:3])
    local_world = _tasks_here(variables, local)
    found = Environment(rank, local_rank, world, local_world, "SLURM")
    _check(found, variables, names)
    return found


def _tasks_here(variables: Mapping[str, str], name: str) -> int:
    """Read SLURM's numbers of tasks: "4(x2),3" is 4 on two machines and 3 on the third."""
    counts: list[int] = []
    for part in variables[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{name}={variables[name]!r} is not of the form '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(set(counts)) == 1:
        return counts[0]
    if "SLURM_NODEID" not in variables:
        raise ValueError(
            f"{name}={variables[name]!r} without SLURM_NODEID: set SLURM_NODEID to the number of "
            "this machine, from 0"
        )
    node = _whole(variables, "SLURM_NODEID")
    if not 0 <= node < len(counts):
        raise ValueError(f"SLURM_NODEID={node}, but {name}={variables[name]!r}: no such machine")
    return counts[node]


def _first_host(hosts: str) -> str:
    """Return the first host of SLURM's notation: "node[003-006,9],gpu1" begins with node003."""
    match = re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)
    if match is None:
        raise ValueError(f"SLURM's list of hosts {hosts!r} is not of the form 'node[1-4]'")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _whole(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ValueError(f"{name}={variables[name]!r} is not a whole number") from None


def _check(found: Environment, variables: Mapping[str, str], names: tuple[str, ...]) -> None:
    rank, local_rank, world, local_world, _ = found
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        raise ValueError(
            f"{_shown(variables, names)}: ranks are from 0 to the number of processes less 1, and "
            "a machine has at most all processes"
        )


def _check_incomplete(
    variables: Mapping[str, str], names: tuple[str, ...], found: Environment | None
) -> None:
    """Variables that are only partly set must agree with a launcher that set all of its own."""
    given = [name for name in names if name in variables]
    if not given:
        return
    if found is None:
        missing = ", ".join(name for name in names if name not in variables)
        raise ValueError(
            f"{_shown(variables, given)} without {missing}: set all of {', '.join(names)}, or none"
        )
    *numbers, launcher = found
    for name, value in zip(names, numbers, strict=True):
        if name in given and _whole(variables, name) != value:
            raise ValueError(
                f"{name}={variables[name]}, but the variables of {launcher} say {value}: "
                f"unset {name}, or set all of {', '.join(names)}"
            )


def _shown(variables: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names)
