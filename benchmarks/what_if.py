"""Does apex.debug.what_if find planted faults, accuse nobody else, and is what it calls safe so?

    python benchmarks/what_if.py faults [--seeds 20]     faults in four small nets, and healthy nets
    python benchmarks/what_if.py cost                    its time in plain training steps
    python benchmarks/what_if.py training                300 steps in each format against float32

Each writes what-if-NAME.json to --out. The nets and the faults are those of a trial that chose the
thresholds at other seeds (0 to 107). Which layers and formats a fault should be found in was
written down in FAULTS before the runs.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from apex.debug import what_if
from apex.debug.what_if.formats import FORMATS, InFormat, Rounding
from tools import quiet_without_reader

FIRST_SEED = 300
BATCHES = 8
Batch = tuple[torch.Tensor, torch.Tensor]


class Scores(nn.Module):
    """Attention without weights: products of queries, keys and values."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        scores = q @ k.transpose(-1, -2)
        scores = scores / math.sqrt(q.shape[-1]) if self.scaled else scores
        return scores.softmax(-1) @ v


class Block(nn.Module):
    """A transformer block of four heads."""

    def __init__(self, width: int, *, scaled: bool) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.core = Scores(scaled=scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output."""
        h = self.n1(x)
        q, k, v = (p(h).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(self.core(q, k, v).transpose(1, 2).flatten(2))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


class Net(nn.Module):
    """A net with a head, and perhaps a second head whose loss is tiny."""

    features = 0
    head: nn.Module

    def __init__(self, *, tiny: bool) -> None:
        super().__init__()
        self.parts()
        self.tiny = nn.Linear(self.features, 10) if tiny else None

    def parts(self) -> None:
        """Make the layers."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the heads read."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the loss."""
        h, y = self.hidden(batch[0]), batch[1].flatten()
        loss = F.cross_entropy(self.head(h).flatten(0, -2), y)
        if self.tiny is not None:
            loss = loss + 1e-7 * F.cross_entropy(self.tiny(h).flatten(0, -2), y % 10)
        return loss


class Mlp(Net):
    """Four linear layers."""

    features = 256

    def parts(self) -> None:
        """Make the layers."""
        self.l0, self.l1, self.l2 = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 256)
        self.head = nn.Linear(256, 10)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the heads read."""
        for layer in (self.l0, self.l1, self.l2):
            x = F.gelu(layer(x))
        return x


class Cnn(Net):
    """Three convolutions with batch norms."""

    features = 32

    def parts(self) -> None:
        """Make the layers."""
        self.c1, self.b1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.c2, self.b2 = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.c3, self.b3 = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the heads read."""
        x = F.max_pool2d(self.b1(self.c1(x)).relu(), 2)
        return self.b3(self.c3(self.b2(self.c2(x)).relu())).relu().mean((2, 3))


class Lstm(Net):
    """Two LSTM layers on an embedding of 50 characters."""

    features = 64

    def parts(self) -> None:
        """Make the layers."""
        self.e = nn.Embedding(50, 32)
        self.l1 = nn.LSTM(32, 64, batch_first=True)
        self.l2 = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 50)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the heads read."""
        return self.l2(self.l1(self.e(x))[0])[0]


class Transformer(Net):
    """Two blocks on embeddings of 50 characters and 16 places."""

    features = 64

    def parts(self) -> None:
        """Make the layers."""
        self.e, self.p = nn.Embedding(50, 64), nn.Embedding(16, 64)
        self.b1, self.b2 = Block(64, scaled=True), Block(64, scaled=True)
        self.n, self.head = nn.LayerNorm(64), nn.Linear(64, 50)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the heads read."""
        return self.n(self.b2(self.b1(self.e(x) + self.p(torch.arange(16)))))


def _channel(size: float, *before: torch.Tensor, after: torch.Tensor) -> None:
    """Make channel 0 larger, and what reads it smaller."""
    for weight in before:
        weight[0] *= size
    after[:, 0] /= size


def _unscaled(net: Any, size: float) -> None:
    net.b2.core.scaled = False
    net.b2.q.weight.mul_(size)
    net.b2.k.weight.mul_(size)


def _norm(net: Any, norm: Any, reader: torch.Tensor, size: float) -> None:
    norm.weight[0] *= size
    norm.bias[0] = size if isinstance(norm, nn.BatchNorm2d) else norm.bias[0]
    reader[:, 0] /= size


BOTH = ("bfloat16", "e4m3")
Plant = Callable[[Any], Any]
# net, fault -> what plants it, the layers that have it, the formats it should be found in
FAULTS: dict[tuple[str, str], tuple[Plant | None, tuple[str, ...], tuple[str, ...]]] = {
    **{(net, "healthy"): (None, (), ()) for net in ("mlp", "cnn", "lstm", "transformer")},
    ("transformer", "attention unscaled"): (lambda n: _unscaled(n, 8), ("b2.core",), BOTH),
    ("mlp", "channel x 1e6"): (
        lambda n: _channel(1e6, n.l1.weight, n.l1.bias, after=n.l2.weight), ("l1", "l2"),
        ("float16", "e4m3"),
    ),
    ("cnn", "channel x 1e5"): (
        lambda n: _norm(n, n.b1, n.c2.weight, 1e5), ("c2",), ("float16", "e4m3"),
    ),
    ("lstm", "row x 3e4"): (lambda n: n.l2.weight_ih_l0[0].mul_(3e4), ("l2",), BOTH),
    ("lstm", "channel x 1e5"): (
        lambda n: _channel(1e5, n.e.weight.T, after=n.l1.weight_ih_l0), ("e", "l1"), ("e4m3",),
    ),
    ("transformer", "channel x 1e5"): (
        lambda n: _norm(n, n.b2.n2, n.b2.f1.weight, 1e5), ("b2.f1",), ("float16", "e4m3"),
    ),
    ("transformer", "attention unscaled, huge"): (
        lambda n: _unscaled(n, 300), ("b2.core", "b2.q", "b2.k"), ("float16", *BOTH),
    ),
    ("mlp", "channel x 1e3"): (
        lambda n: _channel(1e3, n.l1.weight, n.l1.bias, after=n.l2.weight), ("l1", "l2"), ("e4m3",),
    ),
    ("cnn", "channel x 1e3"): (lambda n: _norm(n, n.b1, n.c2.weight, 1e3), ("c2",), ("e4m3",)),
    ("mlp", "row x 3e4"): (lambda n: n.l2.weight[0].mul_(3e4), ("l2", "head"), ("e4m3",)),
    ("cnn", "row x 3e4"): (lambda n: n.c2.weight[0].mul_(3e4), ("c2",), ("e4m3",)),
    ("transformer", "row x 3e4"): (
        lambda n: n.b2.f1.weight[0].mul_(3e4), ("b2.f1", "b2.f2"), ("e4m3",),
    ),
    **{
        (net, "head of loss x 1e-7"): (None, ("tiny",), ("float16",))
        for net in ("mlp", "cnn", "lstm", "transformer")
    },
}  # fmt: skip
NETS: dict[str, Any] = {"mlp": Mlp, "cnn": Cnn, "lstm": Lstm, "transformer": Transformer}


def batches(net: str) -> Iterator[Batch]:
    """Give data of the kind that the net takes."""
    pattern, mixing = torch.randn(10, 3, 12, 12), torch.randn(64, 10)
    while True:
        if net == "mlp":
            x = torch.randn(64, 64)
            yield x, (x @ mixing + torch.randn(64, 10)).argmax(1)
        elif net == "cnn":
            y = torch.randint(10, (32,))
            yield pattern[y] * 0.5 + torch.randn(32, 3, 12, 12), y
        else:
            rows = (torch.randint(50, (16, 1)) + torch.arange(17) * 3) % 50
            wrong = torch.rand(16, 17) < 0.1
            rows = torch.where(wrong, torch.randint(50, (16, 17)), rows)
            yield rows[:, :-1], rows[:, 1:]


def study(net: str, fault: str, seed: int) -> dict[str, Any]:
    """Look at one net; say what was accused in which format, and how near."""
    plant, layers, _ = FAULTS[net, fault]
    torch.manual_seed(seed)
    model = NETS[net](tiny="head" in fault)
    if plant is not None:
        with torch.no_grad():
            plant(model)
    stream = batches(net)
    found = what_if(model, lambda m, b: m(b), [next(stream) for _ in range(BATCHES)])
    rows: dict[str, Any] = {"seed": seed, "loss_scale": found.ranges.scale}
    for form in FORMATS:
        verdicts = {one.name: one.verdicts[form] for one in found.layers}
        accused = [name for name, one in verdicts.items() if one.state == "not safe"]
        rows[form] = {
            "guilty": [name for name in accused if name in layers],
            "innocent": [name for name in accused if name not in layers],
            "worst of the guilty": min(
                [verdicts[n].cosine for n in layers if n in verdicts], default=None
            ),
            "worst of the innocent": min(
                one.cosine for name, one in verdicts.items() if name not in layers
            ),
        }
    return rows


def faults(args: argparse.Namespace) -> dict[str, Any]:
    """Count, for each fault, in how many seeds it was found and others were accused."""
    table: dict[str, Any] = {}
    for (net, fault), (_, layers, formats) in FAULTS.items():
        rows = [study(net, fault, FIRST_SEED + number) for number in range(args.seeds)]
        summary: dict[str, Any] = {"seeds": len(rows), "layers": layers, "should": formats}
        for form in FORMATS:
            summary[form] = {
                "found in": sum(bool(row[form]["guilty"]) for row in rows),
                "accused others in": sum(bool(row[form]["innocent"]) for row in rows),
                "others": sorted({name for row in rows for name in row[form]["innocent"]}),
                "worst of the guilty": _range(rows, form, "worst of the guilty"),
                "worst of the innocent": _range(rows, form, "worst of the innocent"),
            }
        table[f"{net}, {fault}"] = summary
        _write(args, "faults", table)
        print(f"{net}, {fault}: " + "; ".join(
            f"{form} found {summary[form]['found in']} others {summary[form]['accused others in']}"
            for form in FORMATS
        ), flush=True)  # fmt: skip
    return table


def _range(rows: list[dict[str, Any]], form: str, key: str) -> list[float]:
    numbers = [row[form][key] for row in rows if row[form][key] is not None]
    return [round(min(numbers), 4), round(max(numbers), 4)] if numbers else []


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Time 24 linear layers, 8 batches and one format in plain steps, in turns."""
    table: dict[str, Any] = {}
    for width, size in ((256, 64), (512, 128)):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(width, width), nn.ReLU())))
        optimizer = torch.optim.AdamW(model.parameters())
        data = [(torch.randn(size, width), torch.randint(width, (size,))) for _ in range(BATCHES)]

        def loss(net: nn.Module, batch: Batch) -> torch.Tensor:
            return F.cross_entropy(net(batch[0]), batch[1])

        def step(model: Any = model, optimizer: Any = optimizer, batch: Any = data[0]) -> None:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

        for form in FORMATS:
            look = partial(what_if, model, loss, data, formats=[form])
            look()
            plain, ratios = [_plain(step)], []
            for _ in range(args.turns):
                seconds = _seconds(look)
                plain.append(_plain(step))
                ratios.append(seconds / statistics.mean(plain[-2:]))
            table[f"width {width}, batch {size}, {form}"] = {
                "steps": round(statistics.median(ratios), 1),
                "of": [round(min(ratios), 1), round(max(ratios), 1)],
            }
        _write(args, "cost", table)
    return table


def _plain(step: Callable[[], object]) -> float:
    return statistics.median(_seconds(step) for _ in range(5))


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Train three tasks of apex bench in each format; compare the loss with float32's seeds."""
    from apex.commands.bench.training.tasks import load
    from apex.commands.bench.training.tasks.task import TaskOptions

    table: dict[str, Any] = {}
    for name in ("digits-mlp", "digits-cnn", "text-lstm"):
        task: Any = load(name, TaskOptions(torch.device("cpu"), quick=True))
        torch.manual_seed(FIRST_SEED)
        found = what_if(task.model().train(), task.loss, _take(task, FIRST_SEED, BATCHES))
        wide = [_trained(task, FIRST_SEED + n, None, 1.0) for n in range(args.wide)]
        entry: dict[str, Any] = {"float32": [round(one, 4) for one in wide]}
        for form in FORMATS:
            states = {layer.verdicts[form].state for layer in found.layers}
            losses = [
                _trained(task, FIRST_SEED + n, form, found.ranges.scale) for n in range(args.narrow)
            ]
            apart = max(abs(a - b) for a, b in zip(losses, wide, strict=False))
            entry[form] = {
                "verdicts": sorted(states),
                "loss": [round(one, 4) for one in losses],
                "in the range of float32's seeds": sum(
                    min(wide) <= one <= max(wide) for one in losses
                ),
                "farthest from float32 at the same seed": round(apart, 4),
                "range of float32's seeds": round(max(wide) - min(wide), 4),
            }
        table[name] = entry
        _write(args, "training", table)
        print(name, json.dumps(entry), flush=True)
    return table


def _take(task: Any, seed: int, number: int) -> list[Any]:
    found: list[Any] = []
    epoch = 0
    while len(found) < number:
        found += list(task.loader(32, seed + epoch))[: number - len(found)]
        epoch += 1
    return found


def _trained(task: Any, seed: int, form: str | None, scale: float) -> float:
    """The mean loss of the last 20 of 300 steps; an overflow skips a step and halves the scale."""
    torch.manual_seed(seed)
    model, losses = task.model().train(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in _take(task, seed, 300):
        optimizer.zero_grad()
        times = scale if form == "float16" else 1.0
        if form is None:
            loss = task.loss(model, batch)
        else:
            with InFormat(Rounding(FORMATS[form])):
                loss = task.loss(model, batch)
        (loss * times).backward()
        gradients = [p.grad.div_(times) for p in model.parameters() if p.grad is not None]
        if all(bool(one.isfinite().all()) for one in gradients):
            optimizer.step()
        else:  # as amp does
            scale /= 2
        losses.append(loss.item())
    return statistics.mean(losses[-20:])


def _write(args: argparse.Namespace, name: str, table: dict[str, Any]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    where = {"torch": torch.__version__, "first_seed": FIRST_SEED, "batches": BATCHES}
    text = json.dumps({**where, name: table}, indent=1)
    (args.out / f"what-if-{name}.json").write_text(text + "\n")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["faults", "cost", "training"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=9, help="of what_if and plain steps for cost")
    parser.add_argument("--wide", type=int, default=5, help="seeds in float32 for training")
    parser.add_argument("--narrow", type=int, default=2, help="seeds in each format for training")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"faults": faults, "cost": cost, "training": training}
    json.dump(parts[args.part](args), sys.stdout, indent=1)


if __name__ == "__main__":
    with quiet_without_reader():
        main()
