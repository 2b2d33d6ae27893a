"""``python -m apex.parallel.multiproc``: three kinds of scripts, exit codes, ends of processes."""

import os
import signal
import socket
import sys

import pytest

from apex.parallel import multiproc
from tests import forked
from tests.ranks import without_gloo

SECONDS = 300  # a process that does not end fails the test
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_JOB_ID": "17",
}

OF_2018 = """
import argparse, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--name")
parser.add_argument("--rank", default=0, type=int)
parser.add_argument("--world-size", default=1, type=int)
args = parser.parse_args()
print(vars(args), flush=True)
if args.rank == 1:
    while not os.path.exists("rank 0 has printed"):
        time.sleep(0.01)
    sys.exit(3)
open("rank 0 has printed", "w").close()
time.sleep(600)
"""
MEETS_BY_TCP = """
import argparse, sys, torch
parser = argparse.ArgumentParser()
parser.add_argument("--dist-url")
parser.add_argument("--rank", type=int)
parser.add_argument("--world-size", type=int)
args = parser.parse_args()
torch.distributed.init_process_group(
    "gloo", init_method=args.dist_url, rank=args.rank, world_size=args.world_size
)
sys.stdout.write(f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()}\\n")
torch.distributed.barrier()  # rank 0 holds the store that the other may still read
torch.distributed.destroy_process_group()
"""
# One write for each line: torchrun switches buffers off, and print writes each word by itself, so
# that lines of two processes could mix.
WITH_LOCAL_RANK = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
sys.stdout.write(f"{parser.parse_args().local_rank}\\n")
"""
OF_TODAY = f"""
import os, signal, sys, time
words = [str(sys.argv[1:]), *(os.environ[name] for name in {LAUNCHED})]
sys.stdout.write(" ".join(words) + "\\n")
if os.environ["RANK"] == "1":
    while not os.path.exists("rank 0 has printed"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["RANK"] == "0":
    open("rank 0 has printed", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the scripts."""
    scripts = {
        "of_2018.py": OF_2018,
        "meets_by_tcp.py": MEETS_BY_TCP,
        "with_local_rank.py": WITH_LOCAL_RANK,
        "of_today.py": OF_TODAY,
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder, *words, **variables):
    """Run the command in ``folder``; its exit code, sorted lines of output, and errors.

    Its process is forked from one that has imported torch; the scripts are started.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    environment = {**inherited, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = ["-m", "apex.parallel.multiproc", *words]
    options = {"environment": environment, "seconds": SECONDS, "forks": False}
    [(code, out, errors)] = forked.run(command, folder=folder, **options)
    return code, sorted(without_gloo(out).splitlines()), errors


@pytest.mark.dist
def test_a_script_of_2018(folder):
    """Its arguments arrive as they are; rank 1 ends with 3, which ends rank 0, long asleep."""
    words = ["of_2018.py", "--world-size", "2", "--rank", "7", "--name", "$$x ${local_rank}"]
    code, shown, errors = run(folder, "--log-dir", "logs", *words)
    expected = [
        str({"name": "$$x ${local_rank}", "rank": rank, "world_size": 2}) for rank in (0, 1)
    ]
    assert (code, shown) == (3, expected[:1])
    logs = [path.read_text().strip() for path in folder.glob("logs/**/stdout.log")]
    assert logs == expected[1:]
    assert "torchrun runs 2 processes of of_2018.py with --rank --world-size\n" in errors
    assert "rank 1 ended with exit code 3, so multiproc ended the other ranks\n" in errors


@pytest.mark.dist
@pytest.mark.slow
def test_a_script_that_meets_at_an_address_of_its_own(folder):
    """Most of its 4 s are two imports of torch; here ranks start and end as real ones do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--world-size", "2", "meets_by_tcp.py", "--dist-url", f"tcp://127.0.0.1:{port}"]
    assert run(folder, *words)[:2] == (0, ["0 of 2", "1 of 2"])


@pytest.mark.dist
def test_a_script_that_declares_only_local_rank(folder):
    """The number of processes may stand behind its name; it is no argument of the script."""
    code, shown, errors = run(folder, "with_local_rank.py", "--world-size", "2")
    assert (code, shown) == (0, ["0", "1"])
    assert "with --local_rank\n" in errors


@pytest.mark.dist
def test_a_script_that_reads_the_environment(folder):
    code, shown, errors = run(folder, "--world-size", "2", "of_today.py", "--name", "a b")
    assert code == 128 + signal.SIGKILL
    wanted = [f"['--name', 'a b'] {rank} {rank} 2 2 " for rank in (0, 1)]
    assert all(line.startswith(want) for line, want in zip(shown, wanted, strict=True)), shown
    assert "of of_today.py with only its own arguments\n" in errors


@pytest.mark.skipif(os.name != "posix", reason="there is no exec")
def test_a_process_that_srun_started(folder):
    """The script takes the place of the launcher; it has torchrun's variables."""
    code, shown, errors = run(folder, "of_today.py", **SRUN)
    assert (code, shown, errors) == (0, ["[] 3 1 4 2 node1 20017"], "")


class Became(Exception):
    pass


@pytest.fixture
def became(monkeypatch, tmp_path):
    """The arguments that a script gets in a process that srun started."""
    for name in LAUNCHED:  # set first, so that what main() sets is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {**SRUN, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)

    def exec_(program, words):
        raise Became(*words[3:])

    monkeypatch.setattr(os, "name", "posix")
    monkeypatch.setattr(os, "execv", exec_)
    script = tmp_path / "script.py"

    def arguments(text, *words, options=()):
        script.write_text(text)
        with pytest.raises(Became) as caught:
            multiproc.main([*options, str(script), *words])
        return list(caught.value.args)

    return arguments


def declares(*names):
    return f"def main():\n    parser.add_argument(*{names!r})\n"


def test_what_a_script_declares(became):
    both, ranks = declares("--rank", "--world-size"), ["--rank", "3", "--world-size", "4"]
    assert became(both, "x") == ["x", *ranks]
    assert became(declares("--rank", "--world_size")) == ["--rank", "3", "--world_size", "4"]
    assert became(declares("--rank")) == []  # of a matrix
    assert became(declares("--world-size")) == []
    assert became("# --rank --world-size --local_rank\n") == []
    assert became(declares("--local-rank")) == ["--local-rank", "1"]
    assert became(both + declares("--local_rank")) == [*ranks, "--local_rank", "1"]
    assert became(declares("--local_rank"), "--local_rank=9", "x") == ["x", "--local_rank", "1"]
    twice = ["--local_rank", "8", "x", "--local_rank=9"]
    assert became(declares("--local_rank"), *twice) == ["x", "--local_rank", "1"]
    assert became("not python '--local_rank'") == []  # its own error is shown when it runs
    assert became("'\\d --rank'\0") == []
    assert became(both, options=["--pass", "none"]) == []
    assert became("", options=["--pass", "rank,world-size"]) == ranks
    assert became("import options", options=["--pass", "local_rank"]) == ["--local_rank", "1"]


@pytest.mark.parametrize(
    ("options", "words", "text"),
    [
        (
            ["--world-size", "2"],
            [],
            "leave out --log-dir and --world-size: SLURM started 4 processes",
        ),
        ([], ["--world-size=3"], "leave out --log-dir and --world-size: SLURM started 4 processes"),
        ([], ["--world-size", "many"], "--world-size of the script: 'many' is not a whole"),
        ([], ["--world-size"], "--world-size of the script: '' is not a whole"),
        (["--world-size", "0"], [], "argument --world-size: '0' is not a whole number of 1"),
        (["--pass", "gpu"], [], "argument --pass: invalid choice: 'gpu' (choose from "),
        (
            ["--log-dir", "logs"],
            [],
            "leave out --log-dir and --world-size: SLURM started 4 processes",
        ),
    ],
)
def test_refused(became, capsys, options, words, text):
    with pytest.raises(SystemExit, match="2"):
        became("", *words, options=options)
    assert text in capsys.readouterr().err


def test_no_script(capsys):
    with pytest.raises(SystemExit, match="2"):
        multiproc.main(["nowhere.py"])
    assert "nowhere.py is not a file" in capsys.readouterr().err


def test_a_file_instead_of_a_folder(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(SystemExit, match="2"):
        multiproc.main(["--log-dir", str(script), str(script)])
    assert "script.py: is a file; name a folder" in capsys.readouterr().err
