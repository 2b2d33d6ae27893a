"""What examples have in common: wrong options, a full disk and Ctrl-C end with one line."""

import os
import pathlib
import runpy
import sys
from unittest import mock

import pytest
import torch

from tests.examples.imported import EXAMPLES, program

MAIN = {
    "bert": "finetune",
    "dcgan": "main_amp",
    "fp16_optimizer": "minimal",
    "gpt": "train",
    "imagenet": "main_amp",
    "reinforcement_learning": "actor_critic",
    "word_language_model": "main",
}
WRONG = """
bert: --accumulate 0: it must be at least 1
bert: --hidden 30: it must be a multiple of 4
bert: --length 2: it must be at least 3
bert: --warmup 1 | --warmup and --dropout are from 0 to below 1
bert: --save-every 3 | --save-every needs --save FILE
bert: --save missing/file: pass a file in a folder that can be written
bert: --save .: pass a file in a folder that can be written to
bert: --seed -1: it must be 0 to 2**32 - 1
bert: --lr 0 | --lr 0.0: it must be above 0
bert: --lr inf: it must be above 0 and finite
bert: --opt_level O3 | invalid choice: 'O3'
dcgan: --opt_level O6 | invalid choice: 'O6'
dcgan: --batchSize 1: it must be 2 to 1797
dcgan: --ngf 0: it must be at least 1
dcgan: --lr nan | --lr is above 0 and finite, --beta1 is from 0 to below 1
dcgan: --beta1 1 | --lr is above 0 and finite, --beta1 is from 0 to below 1
dcgan: --manualSeed -1: it must be 0 to 2**32 - 1
dcgan: --dataset cifar10 | unrecognized arguments: --dataset cifar10
fp16_optimizer: --dtype float64 | invalid choice: 'float64'
fp16_optimizer: --steps 1: pass 2 or more
fp16_optimizer: --save no/saved.pth: pass a file in a folder that can be written
fp16_optimizer: --save .: pass a file in a folder that can be written to
imagenet: --channels-last ./ | './' was given, True or False is allowed; put DIR before
imagenet: --opt-level o2 | invalid choice: 'o2'
imagenet: -b 0 | 0 was given, it must be at least 1
imagenet: -b x | invalid whole number value: 'x'
gpt: --steps 0: pass 1 or more
gpt: --width 30: pass a multiple of 4
gpt: --opt-level O3 | invalid choice: 'O3'
reinforcement_learning: --envs 0: it must be at least 1
reinforcement_learning: --rollout 1: it must be at least 2
reinforcement_learning: --lr nan: it must be above 0 and finite
reinforcement_learning: --seed 0 -1 | --seed [0, -1]: each must be 0 to 2**32 - 1
reinforcement_learning: --picture .: pass the name of a file that ends in .png
reinforcement_learning: --picture a.xyz: pass the name of a file that ends in .png
reinforcement_learning: --max-steps 0: it must be at least 1
reinforcement_learning: --opt-level O1 o2 | invalid choice: 'o2'
reinforcement_learning: --picture /nowhere/a.png: there is no folder /nowhere
word_language_model: --precision O6 | invalid choice: 'O6'
word_language_model: --batch-size 0: pass more than 0
word_language_model: --lr nan: pass more than 0
word_language_model: --dropout 1 | --dropout 1.0: pass 0 or more, and less than 1
word_language_model: --loss-scale much: pass a number above 0, or dynamic
word_language_model: --loss-scale -1 | --loss-scale -1.0: pass a number above 0, or dynamic
word_language_model: --tied --emsize 16 --nhid 24 | --tied: --emsize 16 and --nhid 24 must be equal
word_language_model: --save no/model.pt: pass a file in a folder that can be written to
word_language_model: --save ..: pass a file in a folder that can be written to
word_language_model: --seed 4294967296: pass 0 to 2**32 - 1
word_language_model: --data nowhere: there is no file *.txt in such a folder
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong_options(line, capsys):
    """What is typed, and what the last line has; without a bar the line repeats the words."""
    folder, _, rest = line.partition(": ")
    words, _, text = rest.partition(" | ")
    words, text = (words, text) if text else (rest.partition(": ")[0], rest)
    with pytest.raises(SystemExit) as error:
        program(folder, MAIN[folder]).main(words.split())
    code, said = error.value.code, capsys.readouterr().err
    assert text in (code if isinstance(code, str) else said).splitlines()[-1]
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("dcgan", "main_amp"),
        ("imagenet", "checkpoint"),
        ("resume", "train"),
        ("word_language_model", "checkpoint"),
    ],
)
def test_a_full_disk_leaves_the_old_checkpoint(folder, name, monkeypatch):
    module, path = program(folder, name), pathlib.Path("file")
    module.save(path, {"step": 1})
    monkeypatch.setattr(module.os, "fsync", lambda file: os.write(-1, b""))
    with pytest.raises(OSError, match="Bad file descriptor"):
        module.save(path, {"step": 2})
    assert torch.load(path, weights_only=True) == {"step": 1}


@pytest.mark.parametrize(
    ("file", "inside", "stopped"),
    [
        ("fp16_optimizer/closure.py", "torch.nn.functional.mse_loss", "stopped"),
        (
            "word_language_model/main.py",
            "re.split",
            "stopped; --resume goes on after the best epoch",
        ),
    ],
)
def test_ends_with_one_line(monkeypatch, file, inside, stopped):
    monkeypatch.syspath_prepend((EXAMPLES / file).parent)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "argv", [file])
    for error, text in ((KeyboardInterrupt(), stopped), (OSError(28, "disk full"), "disk full")):
        with mock.patch(inside, side_effect=error), pytest.raises(SystemExit, match=text):
            runpy.run_path(str(EXAMPLES / file), run_name="__main__")
    for name in {path.stem for path in (EXAMPLES / file).parent.glob("*.py")} - before:
        sys.modules.pop(name, None)
