"""The DCGAN example: its three losses, its score, its files, and that it learns."""

import pytest
import torch
import torch.nn.functional as F

from apex import amp
from tests.checkpoints import assert_equal
from tests.examples.imported import program
from tests.tolerance import assert_close_to_largest

main_amp = program("dcgan", "main_amp")
digits = main_amp.digits

TINY = "--ngf 4 --ndf 4 --nz 8 --batchSize 16"
LEARNING = "--ngf 8 --ndf 8 --nz 16 --lr 2e-3 --niter 6 --opt_level O0"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    amp.reset()


@pytest.fixture
def few(monkeypatch):
    """68 digits: four steps of 16 in an epoch, and four digits that are left out."""
    images, labels = digits.load(16)
    monkeypatch.setattr(digits, "load", lambda size: (images[:68], labels[:68]))


def read(path):
    return torch.load(path, weights_only=True)


@pytest.mark.slow
def test_it_learns(capsys, tmp_path):
    """It takes 2.5 s: so many steps until the scores are apart."""
    main_amp.main(LEARNING.split())
    lines = capsys.readouterr().out.splitlines()
    real, *scores = (
        float(line.split("score ")[1].split()[0].rstrip(",")) for line in lines if "score" in line
    )
    assert real > 8
    assert len(scores) == 7
    assert scores[0] < 1.1
    assert scores[-1] > 2.5  # 3.9 to 4.6 over five seeds
    names = {f"fake_samples_epoch_{epoch:03d}.png" for epoch in range(1, 7)}
    assert {file.name for file in tmp_path.iterdir()} == names | {
        "real_samples.png",
        "checkpoint.pth",
    }


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.slow
def test_a_resumed_run_is_the_straight_one_bit_for_bit(few, tmp_path, level):
    words = f"{TINY} --opt_level {level}"
    main_amp.main(f"{words} --niter 2 --outf straight".split())
    amp.reset()
    main_amp.main(f"{words} --niter 1 --outf half".split())
    amp.reset()
    main_amp.main(f"{words} --niter 2 --outf half --resume half/checkpoint.pth".split())
    saved = read("half/checkpoint.pth")
    assert_equal(saved, read("straight/checkpoint.pth"))
    assert len(saved["amp"]) == 3  # a scale for each loss
    for picture in ("real_samples.png", "fake_samples_epoch_002.png"):
        straight, half = (tmp_path / folder / picture for folder in ("straight", "half"))
        assert half.read_bytes() == straight.read_bytes()


def make(words):
    args = main_amp.parse(f"{TINY} {words}".split())
    torch.manual_seed(0)
    return main_amp.build(args, CPU)


def test_a_step_is_that_of_plain_torch():
    """Two steps at O0: what the generator's loss leaves in the discriminator is not used."""
    gan = make("--opt_level O0")
    torch.manual_seed(0)
    generator, discriminator = main_amp.generator(16, 8, 4), main_amp.discriminator(16, 4)
    optimizers = [
        torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.999))
        for network in (discriminator, generator)
    ]
    batches = [torch.rand(16, 1, 16, 16) for _ in range(2)]
    bce, one, zero = F.binary_cross_entropy_with_logits, torch.ones(16), torch.zeros(16)
    torch.manual_seed(1)
    losses = [gan.step(batch) for batch in batches]
    torch.manual_seed(1)
    for batch, found in zip(batches, losses, strict=True):
        real = bce(discriminator(batch), one)
        made = generator(torch.randn(16, 8, 1, 1))
        fake = bce(discriminator(made.detach()), zero)
        weights = list(discriminator.parameters())
        gradients = torch.autograd.grad(real, weights, retain_graph=True)
        for weight, first, second in zip(
            weights, gradients, torch.autograd.grad(fake, weights), strict=True
        ):
            weight.grad = first + second
        optimizers[0].step()
        fooled = bce(discriminator(made), one)
        weights = list(generator.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(fooled, weights), strict=True):
            weight.grad = gradient
        optimizers[1].step()
        assert found == (real.item(), fake.item(), fooled.item())
    assert_equal(gan.netD.state_dict(), discriminator.state_dict())
    assert_equal(gan.netG.state_dict(), generator.state_dict())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_overflow_lowers_the_scale_of_its_loss_and_skips_its_optimizer(monkeypatch, number):
    gan = make("--opt_level O1")
    nets = {"D": gan.netD, "G": gan.netG}
    before = {key: [p.clone() for p in net.parameters()] for key, net in nets.items()}
    calls, right = [], main_amp.adversarial_loss

    def overflowing(scores, labels):
        calls.append(scores)
        factor = float("inf") if len(calls) == number + 1 else 2.0**-10
        return right(scores, labels) * factor

    monkeypatch.setattr(main_amp, "adversarial_loss", overflowing)
    gan.step(torch.rand(16, 1, 16, 16))
    scales = [scaler["loss_scale"] for scaler in amp.state_dict().values()]
    assert scales == [2.0 ** (15 if of == number else 16) for of in range(3)]
    kept = {key: all(map(torch.equal, before[key], net.parameters())) for key, net in nets.items()}
    assert kept == {"D": number < 2, "G": number == 2}


def test_score():
    """By its definition in float64; its ends are 10 and 1."""
    judge = object.__new__(digits.Judge)
    judge.network = torch.nn.Flatten()
    surely = 1e4 * torch.eye(10).repeat(3, 1)
    assert judge.score(surely) == pytest.approx(10)
    assert judge.score(surely[3:4].repeat(5, 1)) == 1
    logits = torch.randn(20, 10)
    each = logits.double().softmax(1)
    overall = each.mean(0)
    exact = sum((p * (p / overall).log()).sum() for p in each) / 20
    found = torch.tensor(judge.score(logits), dtype=torch.float64)
    assert_close_to_largest(found, exact.exp(), 2.0**-20)  # float32 softmax


@pytest.mark.parametrize("size", [16, 32, 64])
def test_sizes(size):
    images, labels = digits.load(size)
    assert images.shape == (1797, 1, size, size)
    assert (float(images.min()), images.max().item()) == (-1.0, pytest.approx(1.0, abs=0.1))
    edge = size // 8
    assert bool((images[:, :, :edge] == -1).all())
    assert bool((images[:, :, :, -edge:] == -1).all())
    assert sorted(set(labels.tolist())) == list(range(10))
    made = main_amp.generator(size, 8, 2)(torch.randn(3, 8, 1, 1))
    assert made.shape == (3, 1, size, size)
    assert made.abs().max().item() <= 1
    assert main_amp.discriminator(size, 2)(made).shape == (3,)


@pytest.mark.slow
def test_what_cannot_be_resumed(few, tmp_path):
    words = f"{TINY} --niter 1 --opt_level O0"
    main_amp.main(words.split())
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"epoch": 1}, "other")
    torch.save({**read("checkpoint.pth"), "options": {"model": "LSTM"}}, "language")
    (tmp_path / "pickle").write_bytes(b"]a")
    for name in ("none", "text", "pickle", "other", "language", "."):
        with pytest.raises(SystemExit, match=f"--resume {name}: there is no checkpoint of this"):
            main_amp.main([*words.split(), "--resume", name])
    with pytest.raises(SystemExit, match="it was made with --lr 0.001, not 0.1"):
        main_amp.main([*words.split(), "--lr", "0.1", "--resume", "checkpoint.pth"])
    with pytest.raises(SystemExit, match="--outf text: File exists"):
        main_amp.main(["--outf", "text"])
    (tmp_path / "folder" / "real_samples.png").mkdir(parents=True)
    with pytest.raises(SystemExit, match="--outf folder: Is a directory"):
        main_amp.main([*words.split(), "--outf", "folder"])


def test_images_that_are_not_finite_leave_the_last_checkpoint(few, tmp_path):
    words = f"{TINY} --opt_level O0"
    main_amp.main(f"{words} --niter 1".split())
    good = (tmp_path / "checkpoint.pth").read_bytes()
    with pytest.raises(SystemExit, match=r"epoch 1: generated images are not finite; pass less"):
        main_amp.main(f"{words} --lr 1e30".split())
    assert (tmp_path / "checkpoint.pth").read_bytes() == good


def test_an_interrupt_ends_it_without_a_traceback(few, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    words = f"{TINY} --niter 1 --opt_level O0".split()
    with monkeypatch.context() as patch:
        patch.setattr(main_amp.Gan, "step", interrupted)
        with pytest.raises(SystemExit, match="130"):
            main_amp.main(words)
        assert capsys.readouterr().err == "interrupted\n"
    main_amp.main(words)
    monkeypatch.setattr(digits, "Judge", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main_amp.main(words)
    assert capsys.readouterr().err == "interrupted; --resume checkpoint.pth goes on\n"
