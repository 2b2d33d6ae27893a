"""Which process of a job this is, by the environment variables of the launcher that started it.

torchrun, mpirun (Open MPI; MPICH and Intel MPI) and srun tell each process four numbers: rank,
local rank, world size and local world size. The first launcher in this order whose variables are
complete counts: srun may start mpirun or torchrun, seldom the other way round.

SLURM sets ``SLURM_NTASKS`` in an ``salloc`` shell and ``SLURM_PROCID=0`` in a batch script, where
it started no process of a job. Only srun sets ``SLURM_STEP_ID``, so without it the variables of a
job are not read. An interactive shell on a node is a step of one task: ``SLURM_STEP_NUM_TASKS``
says so, and ``SLURM_NTASKS`` is that of the job. Seen with SLURM 22.05.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_Names = tuple[str, str, str, str]  # in the order of the fields of Environment
_VARIABLES: dict[str, _Names] = {
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
_SLURM_LOCAL_SIZES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")


class Environment(NamedTuple):
    """Where this process stands in its job."""

    rank: int  #: From 0 to ``world_size - 1``.
    local_rank: int  #: From 0 to ``local_world_size - 1``, among the processes of this machine.
    world_size: int  #: How many processes the job has.
    local_world_size: int  #: How many of them run on this machine.
    launcher: str  #: Whose variables: "torchrun", "Open MPI", "MPICH", "SLURM" or "none".


def environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Find rank and world size; without a launcher, rank 0 of 1.

    Raises:
        ValueError: The variables are incomplete, no whole numbers or out of
            range. The text names them.

    Example::

        >>> environment({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
        ...              "SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
        Environment(rank=3, local_rank=1, world_size=4, local_world_size=2, launcher='SLURM')
        >>> environment({})
        Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher='none')
    """
    if variables.get("WORLD_SIZE") == "1" and "RANK" in variables:  # enough for torch's env://
        variables = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **variables}
    partial = []
    for launcher, names in _launchers(variables):
        if all(name in variables for name in names):
            rank, local_rank, world, local_world = (_number(variables, name) for name in names)
            if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
                raise ValueError(
                    f"{_shown(variables, names)}: ranks go from 0 to one less than the number of "
                    "processes, and a machine cannot have more than all processes"
                )
            return Environment(rank, local_rank, world, local_world, launcher)
        if any(name in variables for name in names):
            partial.append(names)
    for names in partial:
        missing = ", ".join(name for name in names if name not in variables)
        raise ValueError(
            f"{_shown(variables, names)} without {missing}: set all of {', '.join(names)}, or none"
        )
    return Environment(0, 0, 1, 1, "none")


def master_address(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Find the address and port at which the processes of the job meet.

    The address is ``MASTER_ADDR``; without it, 127.0.0.1 for a job on one machine, and the first
    host of SLURM's list for a job on several, where rank 0 runs. The port is ``MASTER_PORT``;
    without it, 29500, and in a SLURM job 20000 plus the last four digits of the job's id: several
    jobs may share a machine. Set it where two programs of one job do.

    Raises:
        ValueError: As for :func:`environment`; or ``MASTER_PORT`` is no port; or the job runs on
            several machines and the variables do not say where rank 0 is.

    Example::

        >>> master_address({"MASTER_ADDR": "10.0.0.7"})
        ('10.0.0.7', 29500)
    """
    port = 29500  # torchrun's
    if "MASTER_PORT" in variables:
        port = _number(variables, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise ValueError(
                f"MASTER_PORT={port} is not a port; set it to a number from 1 to 65535"
            )
    elif "SLURM_JOB_ID" in variables:
        port = 20000 + _number(variables, "SLURM_JOB_ID") % 10000
    return variables.get("MASTER_ADDR") or _first_host(variables), port


def _first_host(variables: Mapping[str, str]) -> str:
    """Return the machine of rank 0; SLURM's list "node[003-006,9],gpu1" begins with node003."""
    here = environment(variables)
    if here.local_world_size == here.world_size:
        return "127.0.0.1"
    # mpirun starts its helpers by srun on all machines but its own: the step's list lacks that one.
    names = ("SLURM_STEP_NODELIST",) if here.launcher == "SLURM" else ()
    hosts = next(filter(None, map(variables.get, (*names, "SLURM_JOB_NODELIST"))), None)
    if hosts is None:
        raise ValueError(
            f"MASTER_ADDR is not set, and the {here.world_size} processes run on several machines "
            f"({here.local_world_size} on this one); set it to the address of the machine with "
            "rank 0"
        )
    match = re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)
    if match is None:
        raise ValueError(f"SLURM's list of hosts {hosts!r} is not of the form 'node[1-4]'")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def _launchers(variables: Mapping[str, str]) -> Iterator[tuple[str, _Names]]:
    yield from _VARIABLES.items()
    # After the others: torchrun in a container may see some of SLURM's variables, and not all.
    yield from _slurm(variables).items()


def _slurm(variables: Mapping[str, str]) -> dict[str, _Names]:
    """The variables of srun, with the launcher's name; empty where srun started no process."""
    if "SLURM_PROCID" not in variables:
        return {}
    if "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables:
        if _number(variables, "SLURM_PROCID") != 0:
            raise ValueError(
                f"SLURM_PROCID={variables['SLURM_PROCID']} without SLURM_STEP_ID. In a batch "
                "script SLURM_PROCID is 0; start the processes of the job with srun, which sets "
                "both"
            )
        return {}
    size, local = (
        next((name for name in names if name in variables), names[0])
        for names in (_SLURM_SIZES, _SLURM_LOCAL_SIZES)
    )
    return {"SLURM": ("SLURM_PROCID", "SLURM_LOCALID", size, local)}


def _number(variables: Mapping[str, str], name: str) -> int:
    """Read a whole number; of SLURM's tasks for each machine, "4(x2),3", that of this machine."""
    if name not in _SLURM_LOCAL_SIZES:
        try:
            return int(variables[name])
        except ValueError:
            raise ValueError(f"{name}={variables[name]!r} is not a whole number") from None
    counts: list[int] = []
    for part in variables[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{name}={variables[name]!r} is not of the form '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(set(counts)) == 1:
        return counts[0]
    node = _number(variables, "SLURM_NODEID") if "SLURM_NODEID" in variables else -1
    if not 0 <= node < len(counts):
        raise ValueError(
            f"SLURM_NODEID={variables.get('SLURM_NODEID')}, but {name}={variables[name]!r}: set "
            f"SLURM_NODEID to the number of this machine, from 0 to {len(counts) - 1}"
        )
    return counts[node]


def _shown(variables: Mapping[str, str], names: _Names) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
