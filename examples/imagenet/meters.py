"""What is reported of a run: accuracy, averages and lines."""

import time

import torch

__all__ = ["Meter", "Profile", "Report", "hits"]


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Count the images whose class is the likeliest, and among the five likeliest.

    Args:
        logits: (N, classes), of any dtype.
        labels: (N), int64.

    Returns:
        Two float64 numbers on the device of ``logits``. With fewer than five classes the second
        one is N.
    """
    five = min(5, logits.shape[1])
    found = logits.topk(five, dim=1).indices == labels[:, None]
    return torch.stack([found[:, 0].sum(), found.sum()]).double()


class Meter:
    """The last of several numbers, and their weighted average."""

    def __init__(self) -> None:
        self.last = self.total = self.weight = 0.0

    def update(self, value: float, weight: float = 1.0) -> None:
        """Add ``value``, which counts ``weight`` times."""
        self.last = value
        self.total += value * weight
        self.weight += weight

    def __format__(self, spec: str) -> str:
        average = self.total / self.weight if self.weight else 0.0
        return f"{self.last:{spec}} ({average:{spec}})"


class Report:
    """The progress line of an epoch, in the form of NVIDIA's example.

    Args:
        title: How lines begin, ``"Epoch: [3]"``.
        steps: Steps of the whole epoch.
        ranks: Processes that train beside each other, for the speed.
    """

    def __init__(self, title: str, steps: int, ranks: int) -> None:
        self.title, self.steps, self.ranks = title, steps, ranks
        self.time, self.speed, self.loss, self.top1, self.top5 = (Meter() for _ in range(5))
        self._since, self._images, self._taken = time.perf_counter(), 0, 0

    def count(self, images: int) -> None:
        """Note a step of ``images`` images on this rank."""
        self._images += images
        self._taken += 1

    def line(self, step: int, sums: torch.Tensor) -> str:
        """The line after ``step``.

        Args:
            step: Position in the epoch, from 0.
            sums: Loss times images, hits at 1, hits at 5, images, of what is shown now; reading
                them waits for the device, so the clock is right.
        """
        loss, top1, top5, images = sums.tolist()
        self.loss.update(loss / images, images)
        self.top1.update(100 * top1 / images, images)
        self.top5.update(100 * top5 / images, images)
        seconds = time.perf_counter() - self._since
        self.time.update(seconds / self._taken, self._taken)
        self.speed.update(self.ranks * self._images / seconds, seconds)
        self._since, self._images, self._taken = time.perf_counter(), 0, 0
        return (
            f"{self.title}[{step}/{self.steps}]\tTime {self.time:.3f}\tSpeed {self.speed:.3f}\t"
            f"Loss {self.loss:.4f}\tPrec@1 {self.top1:.3f}\tPrec@5 {self.top5:.3f}"
        )


class Profile:
    """A profile of ten steps; rank 0 prints which operations took the time.

    Use it as a context manager: a profiler that still runs when Python ends crashes the process.

    Args:
        first: The step, counted from the start of this program, with which it begins; ``None``
            for no profile.
        rank: Of this process. All ranks end at the same step.
    """

    STEPS = 10

    def __init__(self, first: int | None, rank: int) -> None:
        self.first, self.rank, self.step = first, rank, 0
        self.profiler: torch.profiler.profile | None = None  # while it runs

    def is_over(self) -> bool:
        """Begin the profile if it is time for that, and say if it has ended.

        Call it before each step.
        """
        if self.first is None:
            return False
        if self.step == self.first and self.rank == 0:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        self.step += 1
        return self.step > self.first + self.STEPS

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error: object) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            kind = "device" if torch.cuda.is_available() else "cpu"
            key = f"self_{kind}_time_total"
            print(self.profiler.key_averages().table(sort_by=key, row_limit=20), flush=True)
