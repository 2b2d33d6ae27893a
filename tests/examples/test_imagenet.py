"""The ImageNet example: options, schedule, metrics, networks, data, and what it prints."""

import functools
import math
import random
import re
import sys

import pytest
import torch

from apex import amp
from tests.examples.imagenet import LATEST, TINY, data, main_amp, meters, models, read, run
from tests.tolerance import assert_one_rounding


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    amp.reset()


# Options


def test_defaults_are_those_of_nvidias_example():
    args = main_amp.options.parse(["./"])
    assert (args.dir, args.arch, args.workers, args.epochs, args.start_epoch) == (
        "./",
        "resnet18",
        4,
        90,
        0,
    )
    assert (args.batch_size, args.lr, args.momentum, args.weight_decay) == (256, 0.1, 0.9, 1e-4)
    assert (args.print_freq, args.resume, args.evaluate, args.prof) == (10, None, False, None)
    assert (args.keep_batchnorm_fp32, args.loss_scale, args.sync_bn) == (None, None, False)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--b 224", "batch_size", 224),
        ("--wd 0", "weight_decay", 0.0),
        ("--learning-rate 1", "lr", 1.0),
        ("--local_rank 1", "local_rank", 1),
        ("--local-rank=1", "local_rank", 1),
        ("--loss-scale 128.0", "loss_scale", "128.0"),
        ("--keep-batchnorm-fp32 True", "keep_batchnorm_fp32", "True"),
        ("--channels-last", "channels_last", True),
        ("--channels-last True ./", "channels_last", True),
        ("--channels-last False", "channels_last", False),
        ("", "channels_last", False),
    ],
)
def test_historic_spellings(words, name, value):
    assert getattr(main_amp.options.parse(words.split()), name) == value


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ("-a inception_v3", ValueError, "inception_v3 is not supported: in training it also"),
        ("-a nothing", ValueError, "there is no network 'nothing'; choose from .*resnet18"),
        ("-a tiny --pretrained", ValueError, "--pretrained needs torchvision"),
        ("-a tiny --resume x", FileNotFoundError, "there is no file x. Leave the option out"),
        ("nowhere", ValueError, "no folder nowhere.val; DIR must contain train/ and val/"),
        ("-a tiny --loss-scale big", ValueError, "loss_scale was 'big'; allowed are"),
    ],
)
def test_options_that_do_not_fit(words, error, text):
    with pytest.raises(error, match=text):
        main_amp.main(words.split())


# Schedule, metrics, networks


def test_learning_rate():
    """Linear over five epochs, then a tenth from 30, 60 and 80 on."""
    rate = functools.partial(main_amp.learning_rate, 0.4, steps=10)
    assert [rate(0, 0), rate(0, 9), rate(4, 9)] == [0.4 / 50, 0.4 * (10 / 50), 0.4]
    epochs = [5, 29, 30, 59, 60, 79, 80, 89]
    powers = [0, 0, 1, 1, 2, 2, 3, 3]
    assert [rate(epoch, 3) for epoch in epochs] == [0.4 * 0.1**power for power in powers]


@pytest.mark.parametrize("classes", [1, 3, 5, 8])
def test_hits(classes):
    logits, labels = torch.randn(40, classes), torch.randint(0, classes, (40,))
    places = logits.argsort(dim=1, descending=True).argsort(dim=1)[torch.arange(40), labels]
    expected = [int((places < 1).sum()), int((places < 5).sum())]
    assert meters.hits(logits, labels).tolist() == expected


@pytest.mark.parametrize(
    ("arch", "parameters", "keys"), [("resnet18", 11_689_512, 122), ("resnet50", 25_557_032, 320)]
)
def test_our_resnets_are_those_of_torchvision(arch, parameters, keys, monkeypatch):
    """Sizes and names of torchvision's, whose checkpoints load."""
    monkeypatch.setattr(models, "torchvision_models", lambda: None)
    with torch.device("meta"):
        model = models.build(arch, 1000)
    assert sum(param.numel() for param in model.parameters()) == parameters
    assert len(model.state_dict()) == keys
    assert {"bn1.num_batches_tracked", "layer4.1.conv2.weight", "fc.bias"} <= {*model.state_dict()}
    assert model.layer2[0].downsample[0].weight.shape[-1] == 1
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


# Data


@pytest.fixture
def folder(tmp_path):
    """Pictures of two classes, of several formats, modes and shapes."""
    image = pytest.importorskip("PIL.Image")
    rng = random.Random(0)
    names = {"train": 5, "val": 3}
    for split, count in names.items():
        for label, colour in (("blue", (0, 0, 200)), ("red", (200, 0, 0))):
            (tmp_path / split / label / "more").mkdir(parents=True)
            for number in range(count):
                picture = image.new("RGB", (rng.randint(20, 60), rng.randint(20, 60)), colour)
                picture.paste((90, 90, 90), (0, 0, 10, 10))
                name = f"more/{number}.JPEG" if number == 0 else f"{number}.png"
                mode = {1: "RGBA", 2: "P"}.get(number, "RGB")
                picture.convert(mode).save(tmp_path / split / label / name)
            (tmp_path / split / label / "notes.txt").write_text("no image")
    return tmp_path


def test_an_item_follows_from_seed_epoch_and_index(folder):
    images = data.ImageFolder(folder / "train", 16, seed=3)
    assert images.classes == ["blue", "red"]
    assert [label for _, label in images.files] == [0] * 5 + [1] * 5
    first = images[0, 3][0]
    assert (first.dtype, first.shape) == (torch.uint8, (3, 16, 16))
    torch.rand(7), random.random()
    images[0, 2]
    assert torch.equal(images[0, 3][0], first)
    again = data.ImageFolder(folder / "train", 16, seed=3)
    assert torch.equal(again[0, 3][0], first)
    assert not torch.equal(images[1, 3][0], first)
    assert not torch.equal(data.ImageFolder(folder / "train", 16, seed=4)[0, 3][0], first)


def test_evaluation_sees_the_middle(folder):
    image = pytest.importorskip("PIL.Image")
    picture = image.new("RGB", (64, 32), (10, 20, 30))
    picture.paste((200, 200, 200), (0, 0, 18, 32))  # the middle square of 7/8 begins at 32 - 14
    picture.save(folder / "val" / "blue" / "1.png")
    images = data.ImageFolder(folder / "val", 28, seed=None)
    index = [path for path, _ in images.files].index(str(folder / "val" / "blue" / "1.png"))
    middle = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 28, 28)
    assert torch.equal(images[5, index][0], middle)


def test_random_boxes_are_inside_and_of_all_sizes():
    rng = random.Random(0)
    for size in [(224, 224), (640, 480), (3, 3), (10, 1000)]:
        areas = []
        for _ in range(200):
            left, top, right, bottom = data.random_box(size, rng)
            assert 0 <= left < right <= size[0]
            assert 0 <= top < bottom <= size[1]
            areas.append((right - left) * (bottom - top) / math.prod(size))
        if size == (224, 224):
            assert min(areas) < 0.15
            assert max(areas) > 0.9


def test_folders_that_do_not_fit(folder):
    (folder / "train" / "green").mkdir()
    args = main_amp.options.parse([str(folder)])
    with pytest.raises(ValueError, match="same class folders; in one of them alone: green"):
        data.splits(args)
    with pytest.raises(ValueError, match="no images in .*green; it must contain a folder for each"):
        data.ImageFolder(folder / "train" / "green", 16, None)


def test_without_pillow(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match="needs Pillow: pip install pillow"):
        data.splits(main_amp.options.parse([str(folder)]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_images_arrive_normalised(device):
    """Several batches, whose memory the next ones may reuse."""
    images = torch.randint(0, 256, (5, 4, 3, 32, 32), dtype=torch.uint8)
    batches = [(batch, torch.full((4,), number)) for number, batch in enumerate(images)]
    mean = torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64).view(3, 1, 1)
    moved = data.on_device(batches, torch.device(device), torch.channels_last)
    for number, (batch, labels) in enumerate(moved):
        assert batch.is_contiguous(memory_format=torch.channels_last)
        assert labels.tolist() == [number] * 4
        assert_one_rounding(batch.cpu(), (images[number].double() / 255 - mean) / std)
    assert number == 4


# Runs of one process


def test_it_learns_from_a_folder(folder, capsys):
    """Two classes, so Prec@5 is 100."""
    words = f"{folder} -a tiny --image-size 16 -b 5 -j 0 -p 1 --lr 4 --opt-level O0 --epochs 4"
    main_amp.main([*words.split(), "--channels-last", "True"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == " * Prec@1 100.000 Prec@5 100.000"
    form = (
        r"Epoch: \[3\]\[1/2\]\tTime [\d.]+ \([\d.]+\)\tSpeed [\d.]+ \([\d.]+\)\t"
        r"Loss [\d.]+ \([\d.]+\)\tPrec@1 [\d.]+ \([\d.]+\)\tPrec@5 100.000 \(100.000\)"
    )
    assert len([line for line in lines if re.fullmatch(form, line)]) == 1
    assert read(LATEST)["epoch"] == 4


def test_each_epoch_has_another_order(monkeypatch):
    loaded = []

    def recording(images, keys, *args, **options):
        loaded.append(list(keys))
        return load_batches(images, keys, *args, **options)

    load_batches = data.load_batches
    monkeypatch.setattr(data, "load_batches", recording)
    assert run(f"{TINY} --opt-level O0 --epochs 2")
    assert run(f"{TINY} --opt-level O0 --epochs 1 --seed 1")
    orders = [tuple(index for _, index in keys) for keys in loaded if len(keys) == 28]
    assert [sorted(order) for order in orders] == [list(range(28))] * 3
    assert len({*orders, tuple(range(28))}) == 4
    assert [keys[0][0] for keys in loaded] == [0, 0, 1, 0, 0, 0]  # their epochs; 0 to evaluate


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.slow
def test_a_profile_ends_the_run(first, capsys):
    """Ten steps from ``first`` on, of which there are twelve in all."""
    assert run(f"{TINY} --opt-level O0 --epochs 4 --prof {first}")
    out = capsys.readouterr().out
    assert out.count("Epoch: ") == min(first + 10, 12)
    assert "Self CPU time total" in out
