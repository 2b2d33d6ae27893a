"""The word language model example, tiny, run in this process on a CPU."""

import collections
import itertools
import math
import os
import pathlib
import random
import re
from unittest import mock

import pytest
import torch

from apex import amp
from tests.checkpoints import assert_equal
from tests.examples.imported import killed_at, programs
from tests.tolerance import MEAN_LOSS

NAMES = ("data", "checkpoint", "model", "main", "generate")
TINY = "--emsize 16 --nhid 16 --nlayers 1 --batch_size 8 --bptt 10 --lr 7 --dropout 0.1 --epochs 3"


@pytest.fixture(scope="module")
def modules():
    return dict(zip(NAMES, programs("word_language_model", *NAMES), strict=True))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a text in which one of two words follows each of ten: perplexity 2."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    paragraphs = []
    for _ in range(100):
        numbers = [draw.randrange(10)]
        for _ in range(19):
            numbers.append((numbers[-1] + 1 + draw.randrange(2)) % 10)
        paragraphs.append(" ".join(f"w{number}" for number in numbers))
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    return folder


@pytest.fixture
def run(modules, texts, tmp_path, monkeypatch, capsys):
    """Run main.py with options, in a folder of its own; give back what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def program(words):
        try:
            modules["main"].main([*TINY.split(), "--data", str(texts), *words.split()])
        finally:
            amp.reset()
        return capsys.readouterr().out

    return program


def read(path):
    return torch.load(path, weights_only=True)


PRECISIONS = ["O0", "O1", "O2", "O3", "O4", "O5", "fp16_optimizer"]
LEARNING = [("LSTM", precision) for precision in PRECISIONS]
LEARNING += [
    ("mLSTM", "O1"),
    ("mLSTM", "fp16_optimizer"),
    ("GRU", "O5"),
    ("Tanh", "O2"),
    ("ReLU", "O4"),
]


@pytest.mark.parametrize(("kind", "precision"), LEARNING)
@pytest.mark.slow
def test_learns(run, kind, precision, tmp_path):
    """0.28 to 0.34 of the perplexity by frequency over four seeds of each case."""
    out = run(f"--model {kind} --precision {precision} --log-interval 10")
    found = re.search(r"perplexity ([\d.]+); by frequency alone ([\d.]+)\n$", out)
    reached, unigram = map(float, found.groups())
    assert reached < 0.4 * unigram
    ends = re.findall(r"end of epoch +\d \| time: [\d. ]+s \| .+ ppl +([\d.]+)\n", out)
    assert len(ends) == 3
    assert reached == pytest.approx(min(map(float, ends)), abs=0.051)  # rounded to one place
    steps = math.ceil((2100 * 0.9 // 8 - 1) / 10)
    assert len(re.findall(rf"\d0/ +{steps} batches", out)) == 3 * (steps // 10)
    saved = read(tmp_path / "model.pt")
    assert saved["model"]["encoder.weight"].shape == (16, 16)  # 12 words, a multiple of 8
    assert math.exp(saved["loss"]) == pytest.approx(reached, abs=0.051)
    assert os.listdir() == ["model.pt"]


KILLED = {2: 1, 4: 2, 5: 4}  # the epoch that is killed, and the last one saved before it
# Which epoch is saved has nothing to do with the precision.
CASES = [*(("O2 --tied", epoch) for epoch in KILLED), ("fp16_optimizer", 4)]


@pytest.fixture(scope="module")
def straight():
    """The checkpoints of runs that nobody killed, by precision."""
    return {}


@pytest.mark.parametrize(("precision", "epoch"), [*CASES, ("O1", 5), ("O5", 4)])
@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(run, modules, straight, precision, epoch, monkeypatch):
    """The third of five epochs makes no progress: nothing is saved, the rate is lowered."""
    main, words = modules["main"], f"--epochs 5 --precision {precision}"
    evaluate = main.evaluate

    def evaluations(start):
        found = iter([4.0, 3.0, 3.5, 2.0, 1.0][start:])
        return lambda *args: (evaluate(*args), next(found))[1]

    if precision not in straight:
        monkeypatch.setattr(main, "evaluate", evaluations(0))
        run(words)
        saved = straight[precision] = read("model.pt")
        assert (saved["epoch"], saved["loss"]) == (5, 1.0)
        optimizer = saved["optimizer"].get("optimizer_state_dict", saved["optimizer"])
        assert optimizer["param_groups"][0]["lr"] == 7 / 4
        os.remove("model.pt")

    monkeypatch.setattr(main, "evaluate", evaluations(0))
    with killed_at(main, "take_step", 24 * (epoch - 1) + 5):
        run(words)
    done = KILLED[epoch]
    assert read("model.pt")["epoch"] == done

    monkeypatch.setattr(main, "evaluate", evaluations(done))
    assert f"resumed after epoch {done}\n" in run(f"{words} --resume")
    assert_equal(read("model.pt"), straight[precision])


def test_resumes_that_are_refused(run, texts, tmp_path):
    with pytest.raises(SystemExit, match="there is no checkpoint model.pt"):
        run("--resume")
    run("--epochs 1")
    with pytest.raises(SystemExit, match="model.pt was made with nhid 16, not 24"):
        run("--resume --nhid 24")
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.txt").write_text((texts / "text.txt").read_text() + " w1")
    with pytest.raises(SystemExit, match="made with another text"):
        run(f"--resume --data {other}")
    for content in (b"", b"words", b"]a", b"M", read("model.pt")["model"]):
        if isinstance(content, bytes):
            pathlib.Path("model.pt").write_bytes(content)
        else:
            torch.save(content, "model.pt")
        with pytest.raises(SystemExit, match="model.pt is no checkpoint of this example"):
            run("--resume")


def test_a_text_that_is_too_short(run):
    with pytest.raises(SystemExit, match="a text of 1890 words is too short to be cut into 1500"):
        run("--batch_size 1500")


def test_a_loss_that_is_not_finite(run, modules, monkeypatch):
    monkeypatch.setattr(modules["main"], "evaluate", lambda *args: math.nan)
    with pytest.raises(SystemExit, match="no epoch ended with a finite loss; try less than --lr 7"):
        run("")
    assert os.listdir() == []


def test_loss_scales(run):
    run("--precision fp16_optimizer --epochs 1 --loss-scale 128")
    assert read("model.pt")["optimizer"]["loss_scaler"]["cur_scale"] == 128.0
    run("--precision O1 --epochs 1 --loss-scale 64")
    assert read("model.pt")["amp"]["loss_scaler0"]["loss_scale"] == 64.0


def test_generate(run, modules, capsys):
    """Of the two words that can follow, one does, mostly."""
    run("--precision O2")
    texts = []
    for _ in range(2):
        modules["generate"].main(["--words", "300", "--temperature", "0.5"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    numbers = [int(number) for number in re.findall(r"w(\d)", texts[0])]
    assert not re.sub(r"w\d", "", texts[0]).split()  # nothing else: no <unk>, no <eos>
    right = sum((after - number) % 10 in (1, 2) for number, after in itertools.pairwise(numbers))
    assert right > 0.7 * len(numbers)
    for options in ("--words 0", "--temperature 0", "--temperature nan", "--seed -1"):
        with pytest.raises(SystemExit):
            modules["generate"].main(options.split())
        assert "pass --words of 1 or more, --temperature above 0" in capsys.readouterr().err


def test_unknown_words_are_not_drawn(modules):
    """Nor the scores that only pad the vocabulary."""
    model = mock.Mock(side_effect=lambda word: torch.zeros(1, 1, 8))
    torch.manual_seed(0)
    words = modules["generate"].draw(model, ["<unk>", "<eos>", "a"], 100, 1.0, torch.device("cpu"))
    assert collections.Counter(words).keys() == {"<eos>", "a"}
    model.rnn.reset_hidden.assert_called_once_with(1)


def test_the_text_of_a_folder(modules, tmp_path):
    """Of each file the last tenth of the paragraphs is held out; none is there twice."""
    first = [f"a b, <unk> n{number}" for number in range(10)]
    (tmp_path / "1.txt").write_text("\n\n".join(first))
    again = [first[9], "x\ny  n3", "x y n3", first[0]]
    (tmp_path / "2.txt").write_text("\n \n".join(again))
    (tmp_path / "3.text").write_text("not read")
    text = modules["data"].load(str(tmp_path))
    assert text.vocabulary == ["<unk>", "<eos>", ",", "a", "b"]
    assert text.train.tolist() == [3, 4, 2, 0, 0, 1] * 9 + [0, 0, 0, 1]
    assert text.held.tolist() == [3, 4, 2, 0, 0, 1]
    counts = {3: 9, 4: 9, 2: 9, 0: 21, 1: 10}
    exact = math.prod(58 / counts[word] for word in (3, 4, 2, 0, 0, 1)) ** (1 / 6)
    assert modules["data"].unigram_perplexity(text) == pytest.approx(exact, rel=1e-12)
    columns = modules["data"].columns(text.train, 4, torch.device("cpu"))
    assert torch.equal(columns.T.flatten(), text.train[:56])


def test_pythons_documentation(modules):
    text = modules["data"].load()
    assert len(text.train) > 50_000
    assert len(text.held) > 5_000
    assert text.vocabulary[:2] == ["<unk>", "<eos>"]
    counts = collections.Counter(text.train.tolist())
    assert min(counts[word] for word in range(2, len(text.vocabulary))) == 3
    assert 1000 < len(text.vocabulary) == len(set(text.vocabulary)) == len(counts)


def test_pieces_of_a_text_go_on(modules):
    """In pieces it is the same text: the states are kept from one to the next."""
    main = modules["main"]
    torch.manual_seed(0)
    model = modules["model"].Model("LSTM", 12, 8, 8, 2, 0.0, True).double()
    text = torch.randint(12, (23, 4))
    model.eval()
    whole = main.evaluate(model, text, 22)
    assert main.evaluate(model, text, 5) == pytest.approx(whole, rel=MEAN_LOSS)
    ((loss, words),) = main.losses(model, text, 22)
    assert words == 22 * 4
    assert loss.item() == whole
