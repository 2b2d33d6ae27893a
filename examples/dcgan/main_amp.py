"""DCGAN with ``apex.amp``: two models, two optimizers, and a loss scale for each of three losses.

NVIDIA's ``examples/dcgan/main_amp.py`` on scikit-learn's digits. A discriminator learns to tell
digits (loss 0) from generated images (loss 1), and a generator learns to have its images held for
digits (loss 2).
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam

from apex import amp
from apex.commands.bench.training.tasks.dcgan import discriminator, generator

try:
    import digits
    from matplotlib.image import imsave
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install scikit-learn matplotlib") from None

CHECKPOINT = "checkpoint.pth"
MAY_DIFFER = ("niter", "outf", "resume")  # options that may be others when a run is resumed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options; ends the program with one line where they are wrong."""
    parser = argparse.ArgumentParser(description="Train a DCGAN on digits in mixed precision.")
    add = parser.add_argument
    add("--batchSize", type=int, default=64, help="images in a step (default: %(default)s)")
    add("--imageSize", type=int, default=16, choices=[16, 32, 64], help="height and width")
    add("--nz", type=int, default=100, help="length of the noise (default: %(default)s)")
    add("--ngf", type=int, default=16, help="channels of the generator (default: %(default)s)")
    add("--ndf", type=int, default=16, help="channels of the discriminator (default: %(default)s)")
    add("--niter", type=int, default=25, help="epochs (default: %(default)s)")
    add("--lr", type=float, default=1e-3, help="of both optimizers (default: %(default)s)")
    add("--beta1", type=float, default=0.5, help="of Adam (default: %(default)s)")
    add("--outf", default=".", metavar="FOLDER", help="for pictures and the checkpoint")
    add("--manualSeed", type=int, default=2809, help="default: %(default)s")
    levels = ["O0", "O1", "O2", "O4", "O5"]  # at O3 the eps of Adam is 0: nan
    add("--opt_level", "--opt-level", choices=levels, default="O1", help="default: %(default)s")
    add("--resume", metavar="FILE", help="checkpoint to go on from")
    args = parser.parse_args(argv)
    for name in ("batchSize", "nz", "ngf", "ndf", "niter"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: it must be at least 1")
    if not 2 <= args.batchSize <= 1797:
        parser.error(f"--batchSize {args.batchSize}: it must be 2 to 1797, the number of digits")
    if not 0 < args.lr < math.inf or not 0 <= args.beta1 < 1:
        parser.error("--lr is above 0 and finite, --beta1 is from 0 to below 1")
    if not 0 <= args.manualSeed < 2**32:
        parser.error(f"--manualSeed {args.manualSeed}: it must be 0 to 2**32 - 1")
    return args


@dataclass
class Gan:
    """Two networks, their optimizers, and what they are shown."""

    args: argparse.Namespace
    device: torch.device
    netD: nn.Module
    netG: nn.Module
    optimizerD: Adam
    optimizerG: Adam

    def noise(self, count: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw on the CPU, so that one random state serves every device."""
        drawn = torch.randn(count, self.args.nz, 1, 1, generator=generator)
        return drawn.to(self.device)

    def step(self, real: torch.Tensor) -> tuple[float, float, float]:
        """Train both networks on a batch of digits; give back the three losses."""
        ones, zeros = torch.ones(len(real)).to(real), torch.zeros(len(real)).to(real)

        self.optimizerD.zero_grad()  # also of what the generator's loss left there
        loss_real = adversarial_loss(self.netD(real), ones)
        with amp.scale_loss(loss_real, self.optimizerD, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        fake = self.netG(self.noise(len(real)))
        loss_fake = adversarial_loss(self.netD(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, self.optimizerD, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        self.optimizerD.step()

        self.optimizerG.zero_grad()
        loss_generator = adversarial_loss(self.netD(fake), ones)
        with amp.scale_loss(loss_generator, self.optimizerG, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        self.optimizerG.step()
        return loss_real.item(), loss_fake.item(), loss_generator.item()

    @torch.no_grad()
    def samples(self) -> torch.Tensor:
        """Generate 512 images ``(512, 1, size, size)`` from noise that is always the same."""
        fixed = torch.Generator().manual_seed(self.args.manualSeed)
        self.netG.eval()
        images = self.netG(self.noise(512, fixed)).float()
        self.netG.train()
        return images

    def state(self, epoch: int) -> dict[str, Any]:
        """What a checkpoint holds after ``epoch`` epochs."""
        state = {name: part.state_dict() for name, part in self._parts().items()}
        options, rng = self._options(), torch.get_rng_state()
        return {**state, "epoch": epoch, "options": options, "rng": rng}

    def load(self, path: str) -> int:
        """Go on from a checkpoint; give back how many epochs it has behind it."""
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            options = {name: saved["options"][name] for name in self._options()}
        except Exception:  # noqa: BLE001  (whatever torch.load raises on another kind of file)
            raise SystemExit(f"--resume {path}: there is no checkpoint of this program") from None
        for name, now in self._options().items():
            if options[name] != now:
                was = options[name]
                raise SystemExit(f"--resume {path}: it was made with --{name} {was}, not {now}")
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])
        return saved["epoch"]

    def _options(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self.args).items() if k not in MAY_DIFFER}

    def _parts(self) -> dict[str, Any]:
        names = ("netD", "netG", "optimizerD", "optimizerG")
        return {**{name: getattr(self, name) for name in names}, "amp": amp}


def adversarial_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy, in float32 at every level."""
    return F.binary_cross_entropy_with_logits(scores.float(), labels)


def build(args: argparse.Namespace, device: torch.device) -> Gan:
    """Make the networks and their optimizers and hand them to amp."""
    netG = generator(args.imageSize, args.nz, args.ngf).to(device)
    netD = discriminator(args.imageSize, args.ndf).to(device)
    optimizerD = Adam(netD.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    optimizerG = Adam(netG.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    [netD, netG], [optimizerD, optimizerG] = amp.initialize(
        [netD, netG], [optimizerD, optimizerG], opt_level=args.opt_level, num_losses=3
    )
    return Gan(args, device, netD, netG, optimizerD, optimizerG)


def draw(images: torch.Tensor, path: Path) -> None:
    """Write the first 64 images as a grid, enlarged four times."""
    padded = F.pad(images[:64, 0].cpu(), (1, 1, 1, 1), value=0.0)
    side = padded.shape[-1]
    grid = padded.reshape(8, 8, side, side).transpose(1, 2).reshape(8 * side, 8 * side)
    large = grid.repeat_interleave(4, dim=0).repeat_interleave(4, dim=1)
    imsave(path, large.numpy(), vmin=-1, vmax=1, cmap="gray")


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; at any moment the file is the old one or the new one, whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before it gets its name
    os.replace(temporary, path)


def train(gan: Gan, images: torch.Tensor, judge: digits.Judge, folder: Path) -> None:
    """Train from the checkpoint, if one is given, to the last epoch."""
    args = gan.args
    done = 0 if args.resume is None else gan.load(args.resume)
    draw(images, folder / "real_samples.png")
    print(f"generated, untrained: score {judge.score(gan.samples()):.2f}", flush=True)
    for epoch in range(done + 1, args.niter + 1):
        began = time.perf_counter()
        batches = torch.randperm(len(images)).split(args.batchSize)
        whole = [batch for batch in batches if len(batch) == args.batchSize]
        losses = [gan.step(images[batch]) for batch in whole]
        real, fake, generator = torch.tensor(losses).mean(dim=0).tolist()
        generated = gan.samples()
        if not generated.isfinite().all():
            raise SystemExit(
                f"epoch {epoch}: generated images are not finite; pass less than --lr {args.lr:g}, "
                f"or another level than {args.opt_level}"
            )
        draw(generated, folder / f"fake_samples_epoch_{epoch:03d}.png")
        save(folder / CHECKPOINT, gan.state(epoch))
        print(
            f"[{epoch}/{args.niter}] Loss_D {real + fake:.4f} ({real:.4f} + {fake:.4f}) "
            f"Loss_G {generator:.4f} score {judge.score(generated):.2f} "
            f"{time.perf_counter() - began:.1f} s",
            flush=True,
        )


def run(args: argparse.Namespace, folder: Path) -> None:
    """Make everything and train."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.manualSeed)
    images, labels = (tensor.to(device) for tensor in digits.load(args.imageSize))
    judge = digits.Judge(images, labels)  # before amp.initialize: it is to stay in float32
    print(f"real digits: score {judge.best:.2f}, {judge.accuracy:.1%} recognised", flush=True)
    train(build(args, device), images, judge, folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Train as the options say."""
    args = parse(argv)
    folder = Path(args.outf)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run(args, folder)
    except OSError as error:  # a folder that cannot be written to, a full disk
        raise SystemExit(f"--outf {folder}: {error.strerror}") from None
    except KeyboardInterrupt:
        saved = folder / CHECKPOINT
        print(
            f"interrupted; --resume {saved} goes on" if saved.exists() else "interrupted",
            file=sys.stderr,
        )
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
