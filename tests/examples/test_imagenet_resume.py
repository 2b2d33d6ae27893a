"""The ImageNet example killed and resumed, alone and on two processes.

A killed run is one that raises ``Killed`` at the n-th call of a function; a SIGKILL to one of two
processes is sent once, under torchrun.
"""

import contextlib
import functools
import io
import os
import re
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex import amp
from tests import forked
from tests.checkpoints import assert_equal
from tests.examples.imagenet import (
    BEST,
    FOLDER,
    LATEST,
    SHORT,
    TINY,
    checkpoint,
    read,
    run,
    with_dropout,
)
from tests.ranks import Ranks
from tests.tolerance import SYNCED_EPOCH, assert_close_to_largest


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    amp.reset()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nothing interrupted, at a level."""

    @functools.cache
    def folder(level):
        path, before = tmp_path_factory.mktemp("straight"), os.getcwd()
        os.chdir(path)
        assert run(f"{SHORT} {level}")
        os.chdir(before)
        return path

    return folder


MOMENTS = {  # the n-th call of a function, and the epoch and images of the checkpoint then
    "before any checkpoint": (("main_amp.learning_rate", 2), None),
    "in mid-epoch": (("main_amp.learning_rate", 3), (0, 20)),
    "in an evaluation": (("main_amp.validate", 1), (0, 20)),
    "before the best one": (("main_amp.checkpoint.os.replace", 2), (0, 20)),
    "between the best and the latest": (("main_amp.checkpoint.os.replace", 3), (0, 20)),
    "as an epoch begins": (("main_amp.train_epoch", 2), (1, 0)),
    "in the second epoch": (("main_amp.learning_rate", 6), (1, 20)),
}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_killed_run_goes_on_bit_for_bit(straight, moment, level, tmp_path):
    (moment, saved) = moment
    assert not run(f"{SHORT} {level}", moment)
    found = read(LATEST) if os.path.exists(LATEST) else None
    assert saved == (found and (found["epoch"], found["images_done"]))
    assert run(f"{SHORT} {level} --resume auto")
    for name in (LATEST, BEST):
        assert_equal(read(name), read(straight(level) / name))
    assert sorted(os.listdir(tmp_path)) == [LATEST, BEST]


def test_a_run_goes_on_with_larger_steps(capsys):
    """What counts is the position in the epoch: 20 images are two steps of 10 and one of 20."""
    assert not run(f"{SHORT} O0", ("main_amp.learning_rate", 3))
    saved = read(LATEST)
    assert checkpoint.position(saved, images=28, seed=0, global_batch=10) == 2
    assert checkpoint.position(saved, images=28, seed=0, global_batch=20) == 1
    for options, text in [
        ({"images": 27}, "with images 28; now it is 27"),
        ({"seed": 1}, "with seed 0; now it is 1"),
        ({"global_batch": 8}, "after 20 images; a step has 8 now"),
    ]:
        with pytest.raises(ValueError, match=text):
            checkpoint.position(saved, **{"images": 28, "seed": 0, "global_batch": 10, **options})
    assert run(f"{SHORT} O0 --resume auto -b 20")
    out = capsys.readouterr().out
    assert "=> loaded checkpoint 'checkpoint.pth.tar' (epoch 0, step 1)\nEpoch: [0][1/2]" in out
    saved["images_done"] = 0  # at the end of an epoch they may all change
    assert checkpoint.position(saved, images=27, seed=1, global_batch=8) == 0


def test_evaluate(straight, tmp_path, capsys):
    best = straight("O2") / BEST
    assert run(f"{TINY} --evaluate --resume {best} --opt-level O2")
    lines = capsys.readouterr().out.splitlines()
    expected = read(best)["best_prec1"]
    assert lines[-1] == f" * Prec@1 {expected:.3f} Prec@5 100.000"
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_nvidias_example(straight, tmp_path, capsys):
    """Wrapped names, the best accuracy as a tensor, nothing of amp."""
    ours = read(straight("O2") / LATEST)
    theirs = {"epoch": 1, "arch": "tiny", "optimizer": ours["optimizer"]}
    theirs["state_dict"] = {f"module.{key}": value for key, value in ours["state_dict"].items()}
    theirs["best_prec1"] = torch.tensor(100.0)
    torch.save(theirs, "theirs")
    model = with_dropout("tiny", 3)
    checkpoint.load("theirs", "tiny", model, None)
    assert_equal(dict(model.state_dict()), dict(ours["state_dict"]))
    assert run(f"{SHORT} O2 --resume theirs")
    lines = capsys.readouterr().out.splitlines()
    loaded = lines.index("=> loaded checkpoint 'theirs' (epoch 1, step 0)")
    assert lines[loaded + 1] == "=> 'theirs' holds no state of amp: the loss scale starts anew"
    assert lines[loaded + 2].startswith("Epoch: [1][0/3]")
    assert read(LATEST)["best_prec1"] == 100.0
    assert not os.path.exists(BEST)


def test_files_that_are_no_checkpoints(straight):
    path = straight("O2") / LATEST
    with pytest.raises(ValueError, match="is of the network tiny, the options say resnet18. Pass"):
        checkpoint.load(path, "resnet18", nn.Identity(), None)
    torch.save({"arch": "tiny"}, "other")
    with pytest.raises(
        ValueError, match="other is no checkpoint of this example: it lacks epoch, st"
    ):
        checkpoint.load("other", "tiny", nn.Identity(), None)


# Two processes

PAIR = f"{SHORT} O2 --sync_bn -b 5"  # the images of a step are those of one process


def run_rank(rank, words, port, folder, moment, dropout):
    """What a rank does: a run in ``folder``; give back what it printed and if it was killed."""
    os.chdir(folder)
    if dist.is_initialized():
        dist.destroy_process_group()  # the pair's own
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**here, **place}.items()})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        finished = run(words, moment, dropout=dropout)
    if dist.is_initialized():
        dist.destroy_process_group()  # a killed run leaves it
    return out.getvalue().splitlines(), finished


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Run the example on two processes in a folder; give back what each rank returned."""
    with Ranks(tmp_path_factory.mktemp("pair")) as both:

        def order(words, folder, moment=None, *, dropout=True):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            options = {"moment": moment, "dropout": dropout}
            job = functools.partial(run_rank, words=words, port=port, folder=str(folder), **options)
            return both.run(job)

        yield order


@pytest.fixture(scope="module")
def straight_pair(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight_pair")
    (out, finished), (silence, other_finished) = pair(PAIR, folder)
    assert finished
    assert other_finished
    return folder, out, silence


@pytest.mark.dist
@pytest.mark.slow
def test_rank_0_speaks_for_both(straight_pair):
    _, out, silence = straight_pair
    assert not [line for line in silence if line.startswith(("Epoch", "Test", " *", "=>"))]
    assert len([line for line in out if line.startswith("Epoch: [1][")]) == 3
    assert len([line for line in out if line.startswith(" * Prec@1")]) == 2


@pytest.mark.dist
@pytest.mark.parametrize("moment", [("main_amp.learning_rate", 3), ("main_amp.learning_rate", 6)])
@pytest.mark.slow
def test_two_killed_processes_go_on_bit_for_bit(pair, straight_pair, moment, tmp_path):
    assert [finished for _, finished in pair(PAIR, tmp_path, moment)] == [False, False]
    assert read(LATEST)["images_done"] == 20
    assert [finished for _, finished in pair(f"{PAIR} --resume auto", tmp_path)] == [True, True]
    assert_equal(read(LATEST), read(straight_pair[0] / LATEST))
    assert_equal(read(BEST), read(straight_pair[0] / BEST))


@pytest.mark.dist
def test_two_processes_evaluate_each_image_once(pair, straight, tmp_path):
    """Seven images: four on rank 0, three on rank 1."""
    saved = read(straight("O2") / LATEST)
    saved["state_dict"]["0.fc.weight"].zero_()
    saved["state_dict"]["0.fc.bias"].copy_(torch.tensor([1.0, 0.0, 0.0]))
    torch.save(saved, "first_class")  # three of the seven are of it
    words = f"{TINY} --evaluate --opt-level O2 --resume {tmp_path}/first_class"
    (out, _), _ = pair(words, tmp_path)
    assert out[-1] == " * Prec@1 42.857 Prec@5 100.000"


KILLING = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import main_amp
main_amp.models.build = lambda *a, build=main_amp.models.build, **k: main_amp.nn.Sequential(
    build(*a, **k), main_amp.nn.Dropout(0.5)
)
rate, left = main_amp.learning_rate, 6
def dying(*args):
    global left
    left -= 1
    if (left, os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == (0, "1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(*args)
main_amp.learning_rate = dying
if __name__ == "__main__":
    main_amp.main()
"""


@pytest.mark.dist
def test_two_processes_train_as_one(pair, tmp_path):
    """With --sync_bn, half the batch each: the same images in a step, the same weights after it."""
    words = f"{TINY} --lr 0.1 --opt-level O0 --epochs 1"
    assert run(words, dropout=False)
    alone = read(LATEST)["state_dict"]
    (_, finished), _ = pair(f"{words} --sync_bn -b 5", tmp_path, dropout=False)
    assert finished
    together = read(LATEST)["state_dict"]
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        assert_close_to_largest(together[name], value, SYNCED_EPOCH)


@pytest.mark.dist
@pytest.mark.slow
def test_torchrun_restarts_what_a_sigkill_ended(straight_pair, tmp_path):
    """Rank 1 is killed in the second epoch; rank 0 ends with an error; both go on.

    It takes 2.8 s: four processes, each with two that load images.
    """
    (tmp_path / "killing.py").write_text(KILLING.format(folder=str(FOLDER)))
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1"
    words = [*torchrun.split(), "killing.py", *PAIR.split(), "--resume", "auto"]
    words += ["-j", "1"]  # processes that load change nothing
    own = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    [(code, out, errors)] = forked.run(words, folder=tmp_path, environment=own, seconds=300)
    assert code == 0, errors
    assert "=> no checkpoint.pth.tar here yet: from the beginning" in out
    # Mostly that of step 2; rank 0 may still have been writing it when it was stopped.
    assert re.search(r"=> loaded checkpoint 'checkpoint.pth.tar' \(epoch \d, step \d\)", out)
    assert_equal(read(LATEST), read(straight_pair[0] / LATEST))
