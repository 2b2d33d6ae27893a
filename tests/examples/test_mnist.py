"""The programs of examples/mnist, tiny: their lines, their ways of being started, their data."""

import argparse
import gzip
import os
import re
import socket

import pytest
import torch

from tests import forked
from tests.examples.imported import EXAMPLES, programs
from tests.ranks import without_gloo

FOLDER, NAMES = EXAMPLES / "mnist", ("common", "data")
SECONDS = 600  # for all processes of a run together: a hang fails
# 55 to 63 % right over four seeds on one device; at 1e-2 some orders of the images end at 10 %.
TINY = ["--epochs", "1", "--lr", "3e-3", "--batch-size", "4", "--limit"]
LINES = (
    r"Epoch \[1/1\], Step \[100/100\], Loss: \d+\.\d{4}\n"
    r"Training complete in: 0:00:\d\d\.\d{6}\n"
    r"Accuracy on 599 test images: (\d+\.\d\d) %\n"
)
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

pytest.importorskip("sklearn")


def run(*commands):
    """Run Python with each list of words at the same time; codes, outputs and errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    own = {**inherited, "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
    done = forked.run(*commands, folder=FOLDER, environment=own, seconds=SECONDS)
    return [(code, without_gloo(out), errors) for code, out, errors in done]


def without_time(text):
    return re.sub(r"complete in: .+", "", text)


def accuracy(text):
    """Check the three lines; nothing follows them, and no other rank wrote any."""
    assert len(re.findall("Epoch|Training|Accuracy", text)) == 3
    return float(re.search(LINES + "$", text)[1])


@pytest.mark.slow
def test_one_device():
    [(code, out, errors)] = run(["mnist.py", *TINY, "400"])
    assert (code, errors) == (0, "")
    assert accuracy(out) > 30  # by chance: 10
    assert re.fullmatch(LINES, out)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The digits as MNIST's files, for which a process needs neither scikit-learn nor a second."""
    folder, (data,) = tmp_path_factory.mktemp("digits"), programs("mnist", "data")
    for part, names in zip(data.load(limit=800), (data.FILES[:2], data.FILES[2:]), strict=True):
        for values, name in zip(part.tensors, names, strict=True):
            values = (values.squeeze(1) * 255 if values.is_floating_point() else values).byte()
            sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / name).write_bytes(
                bytes([0, 0, 8, values.ndim]) + sizes + bytes(values.numpy())
            )
    return ["--data", str(folder)]


MIXED = ["mnist-mixed.py", *TINY, "800"]
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.dist
@pytest.mark.slow
def test_mixed_precision_on_two_processes(files):
    """Rank 0 evaluates alone. Of 2.5 s most are 100 steps on two ranks, what it needs to learn."""
    [(code, out, _)] = run([*LAUNCHER, *MIXED, *files])
    assert code == 0
    assert "Selected optimization level O2" in out
    assert accuracy(out) > 30


@pytest.mark.exhaustive
@pytest.mark.dist
def test_it_is_the_same_training_if_torchrun_starts_the_processes():
    [(code, out, errors)] = run([*MIXED, "-g", "2"])
    assert (code, errors) == (0, "")
    [(code, again, _)] = run([*LAUNCHER, *MIXED])
    assert code == 0
    assert without_time(again) == without_time(out)


@pytest.mark.dist
@pytest.mark.slow
def test_two_machines(files):
    """Only rank 0 writes. test_who_starts_what has machines of several processes."""
    words = ["mnist-distributed.py", *TINY, "800", "-n", "2", "-g", "1", *files, "-nr"]
    (code, out, errors), second = run([*words, "0"], [*words, "1"])
    assert (code, errors) == (0, "")
    assert accuracy(out) > 30
    assert second == (0, "", "")


@pytest.fixture
def modules():
    return argparse.Namespace(**dict(zip(NAMES, programs("mnist", *NAMES), strict=True)))


def options(nodes=1, gpus=1, nr=0):
    return argparse.Namespace(nodes=nodes, gpus=gpus, nr=nr)


def srun(rank, local_rank, world_size, per_machine):
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    return dict(zip(names, map(str, (rank, local_rank, world_size, per_machine)), strict=True))


@pytest.mark.parametrize(
    ("asked", "variables", "expected"),
    [  # first rank, world size, processes of this machine; in place: local rank first
        (options(), {}, ("spawn", 0, 1, 1)),
        (options(4, 8, 2), {}, ("spawn", 16, 32, 8)),
        (options(), srun(3, 1, 4, 2), ("here", 1, 2, 4, 2)),
        (options(2, 2), srun(3, 1, 4, 2), ("here", 1, 2, 4, 2)),
        (options(2, 8), srun(1, 0, 2, 1), ("spawn", 8, 16, 8)),  # each task is a machine
        (options(1, 2), srun(0, 0, 1, 1), ("spawn", 0, 2, 2)),  # an interactive shell
    ],
)
def test_who_starts_what(modules, monkeypatch, asked, variables, expected):
    for name in (*LAUNCHED, "MASTER_PORT"):  # set first, so that what start() sets is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {**variables, "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(modules.common, "_run", lambda *words: calls.append(("here", *words[:4])))
    monkeypatch.setattr(
        torch.multiprocessing, "spawn", lambda f, words, nprocs: calls.append(("spawn", *words[:3]))
    )
    modules.common.start(lambda process, args: None, asked)
    assert calls == [expected]
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("here", "29500")


@pytest.mark.parametrize(
    ("asked", "variables", "gpus", "text"),
    [
        (options(2, 2, 2), {}, 0, "-n 2 -g 2 -nr 2: machines and GPUs are 1 or more"),
        (options(1, 0), {}, 0, "-n 1 -g 0 -nr 0: machines"),
        (options(1, 4), srun(1, 1, 2, 2), 0, "-n 1 -g 4 -nr 0, but SLURM started 2 processes"),
        (options(1, 4), {}, 2, "-n 1 -g 4 -nr 0, but this machine has 2 GPUs"),
    ],
)
def test_what_cannot_be_started(modules, monkeypatch, asked, variables, gpus, text):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(SystemExit, match=text):
        modules.common.start(None, asked)


def test_digits(modules):
    """Training images are shifted copies of training digits alone."""
    train, test = modules.data.load()
    images, labels = train.tensors
    assert len(train) >= 20_000
    assert images.shape[1:] == test.tensors[0].shape[1:] == (1, 28, 28)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    digits, tested = (
        {bytes(digit.numpy()) for digit in map(cut_out, part.tensors[0])} for part in (train, test)
    )
    assert (len(digits), len(tested)) == (1198, 599)  # however shifted, the same digit
    assert not digits & tested
    assert len({bytes(image.numpy()) for image in images}) == len(images)
    again, _ = modules.data.load(limit=3000)
    assert torch.equal(again.tensors[0], images[:3000])
    assert torch.equal(again.tensors[1], labels[:3000])


def cut_out(image):
    """The part of an image that is not empty."""
    rows, columns = image[0].any(dim=1).nonzero(), image[0].any(dim=0).nonzero()
    return image[0, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].contiguous()


def test_files_of_mnist(modules, tmp_path):
    """Files as such and compressed; the header gives the sizes."""
    images, labels = bytes(range(12)), bytes([7, 9])
    sizes = [(2).to_bytes(4, "big"), (2).to_bytes(4, "big"), (3).to_bytes(4, "big")]
    of_images, of_labels = b"\0\0\x08\x03" + b"".join(sizes), b"\0\0\x08\x01" + sizes[0]
    (tmp_path / "train-images-idx3-ubyte").write_bytes(of_images + images)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(of_labels + labels))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(of_images + images[::-1]))
    with pytest.raises(SystemExit, match="neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ub"):
        modules.data.load(str(tmp_path))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(of_labels + labels[::-1])
    train, test = modules.data.load(str(tmp_path))
    pixels = torch.arange(12, dtype=torch.float32).reshape(2, 1, 2, 3) / 255
    assert torch.equal(train.tensors[0], pixels)
    assert torch.equal(test.tensors[0], pixels.flip(0, 2, 3))
    assert [part.tensors[1].tolist() for part in (train, test)] == [[7, 9], [9, 7]]
    assert len(modules.data.load(str(tmp_path), limit=1)[0]) == 1
