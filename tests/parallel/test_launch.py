"""Ranks from the variables of launchers. Those of SLURM and of mpirun are as real ones set them."""

import pytest

from apex.parallel.launch import Environment, environment, master_address

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SALLOC = {  # sbatch and salloc, five tasks on two machines
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "5",
    "SLURM_NTASKS_PER_NODE": "3",
    "SLURM_TASKS_PER_NODE": "3(x2)",
}
BATCH = {**SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **BATCH,
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}
INTERACTIVE = {  # the shell of an salloc that is itself a step
    **BATCH,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "node01",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
PMI2 = {**SRUN, "PMI_RANK": "4", "PMI_SIZE": "5"}  # srun --mpi=pmi2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 0, 1, 1, "none")),
        (TORCHRUN, (5, 1, 8, 4, "torchrun")),
        (OPEN_MPI, (3, 1, 4, 2, "Open MPI")),
        (MPICH, (1, 1, 2, 2, "MPICH")),
        (SALLOC, (0, 0, 1, 1, "none")),
        (BATCH, (0, 0, 1, 1, "none")),
        (INTERACTIVE, (0, 0, 1, 1, "SLURM")),
        (SRUN, (4, 1, 5, 2, "SLURM")),
        (PMI2, (4, 1, 5, 2, "SLURM")),
        ({**BATCH, **OPEN_MPI}, (3, 1, 4, 2, "Open MPI")),
        ({**SRUN, **OPEN_MPI}, (3, 1, 4, 2, "Open MPI")),
        ({**SRUN, **TORCHRUN}, (5, 1, 8, 4, "torchrun")),
        ({**TORCHRUN, **BATCH, "SLURM_PROCID": "1"}, (5, 1, 8, 4, "torchrun")),  # in a container
        ({**SRUN, "WORLD_SIZE": "9"}, (4, 1, 5, 2, "SLURM")),  # exported by the batch script
    ],
)
def test_who_counts(variables, expected):
    assert environment(variables) == expected


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [("4(x2)", "1", 4), ("4(x2),3", "2", 3), ("2,4(x2)", "0", 2), ("7", "0", 7)],
)
def test_tasks_of_a_machine(tasks, node, expected):
    slurm = {**SRUN, "SLURM_STEP_NUM_TASKS": "12"}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert environment(slurm).local_world_size == expected


def test_slurm_without_a_job():
    """A program that sets what srun sets, and only that."""
    slurm = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
    slurm["SLURM_NTASKS_PER_NODE"] = "2"
    assert environment(slurm) == Environment(1, 1, 4, 2, "SLURM")


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "RANK=0 without LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE: set all"),
        (without(TORCHRUN, "LOCAL_RANK"), "RANK=5, .* without LOCAL_RANK: set all of RANK, "),
        (without(MPICH, "MPI_LOCALNRANKS"), "PMI_SIZE=2 without MPI_LOCALNRANKS"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_STEP_TASKS_PER_NODE=3,2 without SLURM_LOCALID"),
        (without(SRUN, "SLURM_NODEID"), "SLURM_NODEID=None, .*'3,2': set SLURM_NODEID .* 0 to 1"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2, but SLURM_STEP_TASKS_PER_NODE='3,2'"),
        ({**BATCH, "SLURM_PROCID": "1"}, "SLURM_PROCID=1 without SLURM_STEP_ID"),
        ({**BATCH, "WORLD_SIZE": "5"}, "WORLD_SIZE=5 without RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8, LOCAL_RANK=1, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4: "),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1"),
        ({**TORCHRUN, "RANK": ""}, "RANK='' is not a whole number"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3 x 2"}, "'3 x 2' is not of the form"),
    ],
)
def test_errors_name_the_variables(variables, text):
    with pytest.raises(ValueError, match=text):
        environment(variables)


ON_TWO_MACHINES = {**SRUN, "SLURM_JOB_NODELIST": "elsewhere"}


@pytest.mark.parametrize(
    ("variables", "address", "port"),
    [
        ({}, "127.0.0.1", 29500),
        ({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}, "head", 1234),
        (MPICH, "127.0.0.1", 29500),
        (BATCH, "127.0.0.1", 24567),
        (ON_TWO_MACHINES, "node01", 24567),
        ({**OPEN_MPI, **SALLOC}, "node01", 24567),
        # mpirun started its helper on the second machine by srun, and that list lacks the first.
        ({**OPEN_MPI, **SRUN, "SLURM_STEP_NODELIST": "node02"}, "node01", 24567),
    ],
)
def test_where_the_processes_meet(variables, address, port):
    assert master_address(variables) == (address, port)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("gpu1,gpu2", "gpu1"),
        ("node[003-006,9],gpu1", "node003"),
        ("rack[2,4]-node[01-16].cluster,x", "rack2-node01.cluster"),
    ],
)
def test_first_host(hosts, first):
    assert master_address({**SRUN, "SLURM_STEP_NODELIST": hosts})[0] == first


def test_errors_of_addresses():
    with pytest.raises(ValueError, match="MASTER_ADDR is not set, and the 4 processes run on"):
        master_address(OPEN_MPI)
    with pytest.raises(ValueError, match="MASTER_PORT=70000 is not a port"):
        master_address({"MASTER_PORT": "70000"})
    with pytest.raises(ValueError, match=r"list of hosts ',' is not of the form"):
        master_address({**SRUN, "SLURM_STEP_NODELIST": ","})


def test_the_process_itself(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert environment() == (5, 1, 8, 4, "torchrun")


def test_one_process_of_torchs_env_needs_no_local_numbers():
    found = environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert found == (0, 0, 1, 1, "torchrun")
    with pytest.raises(ValueError, match="without LOCAL_RANK, LOCAL_WORLD_SIZE"):
        environment({"RANK": "0", "WORLD_SIZE": "2"})
