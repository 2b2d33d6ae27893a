"""A script prints, writes and returns under `apex debug` what it does alone, with a NaN or without.

All but the last two tests share one process that forks the scripts (`both_ways.py`).
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="scripts are forked")

HEAD = """
import os, sys, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self, **bad):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    def forward(self, x):
        return self.body(x)
def batch(step, bad=3):
    x = torch.randn(16, 8)
    if step == bad:
        x[3, 1] = float("nan")
    return x
def train(net, optimizer, steps=6, bad=3):
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(step, bad)).square().mean()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
    return loss
"""
SGD = HEAD + "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"

SCRIPTS = {
    "healthy": SGD + "train(net, optimizer, bad=None)",
    "exit code 3": SGD + "if not train(net, optimizer).isfinite(): sys.exit(3)\nprint('fine')",
    "an error": SGD
    + "if not train(net, optimizer).isfinite(): raise ValueError('diverged')\nprint('fine')",
    "a text as exit code": SGD + "train(net, optimizer)\nsys.exit(['diverged'])",
    "os._exit": SGD + "train(net, optimizer)\nsys.stdout.flush()\nos._exit(5)",
    "an excepthook": SGD
    + """
def hook(kind, error, frames):
    while frames.tb_next:
        frames = frames.tb_next
    print(kind.__name__, error, frames.tb_frame.f_code.co_name, frames.tb_lineno)
    sys.exit(7)
sys.excepthook = hook
train(net, optimizer)
raise ValueError("diverged")
""",
    "checkpoints": HEAD
    + """
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), Net().body[:0],
                    nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), 0.1)
for part in range(3):
    train(net, optimizer, 2, bad=1 if part == 1 else None)
    entries = net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    torch.save(entries, f"{part}.pt")
    torch.save(net, f"whole{part}.pt")
""",
    "O1 with overflows": HEAD
    + """
from apex import amp
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net, optimizer = amp.initialize(net, optimizer, opt_level="O1", verbosity=0, init_scale=2.0**24)
for step in range(8):
    optimizer.zero_grad()
    loss = net(batch(step, 5) * (1e4 if step == 2 else 1)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    print(step, loss.item(), amp.state_dict())
""",
    "GradScaler": HEAD
    + """
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
for step in range(24):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = net(batch(step, step if step > 6 else None)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), scaler.get_scale())
torch.save(scaler, "scaler.pt")
torch.save(net, "net.pt")
""",
    "LBFGS": HEAD
    + """
net = Net()
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
def closure(x):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss
for step in range(5):
    x = batch(step)
    print(step, optimizer.step(lambda: closure(x)).item())
""",
    "threads": SGD
    + """
import threading, time
def other():
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    train(net, optimizer, bad=2)
    print("a thread that ends last", __name__, type(net) is sys.modules["__main__"].Net)
thread = threading.Thread(target=other)
train(net, optimizer, 2)
thread.start()
""",
    "a pool that nobody shuts down": SGD
    + """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
print(pool.submit(train, net, optimizer).result().item())
""",
    "pickles of __main__": SGD
    + """
import copy, dataclasses, pickle
@dataclasses.dataclass
class State:
    net: Net
    step: int
train(net, optimizer)
entries = pickle.dumps(State(net, 6))
open("state.pkl", "wb").write(entries[:100])
print(pickle.loads(entries).step, type(pickle.loads(entries)), copy.deepcopy(net).body[0].bias)
torch.save(net, "net.pt")
""",
    "exit functions": SGD
    + """
import atexit
def save():
    torch.save(net, "last.pt")
    print("saved", sys.argv, __name__)
atexit.register(save)
train(net, optimizer)
""",
    "a forward that prints": SGD
    + """
import logging
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
forward = net.forward
def speak(x):
    print("forward", tuple(x.shape))
    logging.info("also")
    return forward(x).sqrt()
net.forward = speak
train(net, optimizer)
""",
    "random numbers": SGD
    + """
import random
import numpy as np
np.random.seed(0), random.seed(0)
forward = net.forward
def noisy(x):
    x = x * random.random() * np.random.rand() * torch.rand(16, 8)
    return forward(torch.bernoulli(torch.full_like(x, 0.5)) / (x - x))
net.forward = noisy
train(net, optimizer)
print(random.random(), np.random.rand(), torch.rand(1))
""",
    "warnings": SGD
    + """
import warnings
warnings.showwarning = lambda message, *_: print("warning", message)
forward = net.forward
def warn(x):
    warnings.warn("of each forward")
    return forward(x)
net.forward = warn
train(net, optimizer)
warnings.warn("once"); warnings.simplefilter("error")
train(net, optimizer, 1) if False else None
""",
    "warnings as errors": "import warnings\nwarnings.simplefilter('error')\n"
    + SGD
    + "train(net, optimizer)",
    "a GAN": HEAD
    + """
G, D = nn.Linear(4, 8), Net()
of_g, of_d = torch.optim.Adam(G.parameters(), 0.01), torch.optim.Adam(D.parameters(), 0.01)
for step in range(5):
    fake = G(torch.randn(16, 4))
    of_d.zero_grad()
    (D(batch(step)).mean() - D(fake.detach()).mean()).backward()
    of_d.step()
    of_g.zero_grad()
    D(fake).mean().log().backward()
    of_g.step()
    print([p.sum().item() for p in (*G.parameters(), *D.parameters())])
""",
    "a DataLoader with a process": SGD
    + """
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(48, 8)
x[20] = float("nan")
for step, (rows,) in enumerate(DataLoader(TensorDataset(x), 16, shuffle=True, num_workers=1)):
    optimizer.zero_grad()
    loss = net(rows).square().mean()
    loss.backward()
    optimizer.step()
    print(step, rows.sum().item(), loss.item())
""",
    "names and paths": SGD
    + """
import inspect
print(__name__, __file__ == os.path.abspath("script.py"), sys.argv, __spec__ is None
      if "__spec__" in globals() else True, inspect.getsource(Net).count("forward"),
      sys.path[0] == os.getcwd(), os.listdir())
train(net, optimizer)
""",
    "a stdout of its own": SGD
    + """
class Tee:
    def __init__(self):
        self.file, self.stream = open("log.txt", "w"), sys.stdout
    def write(self, text):
        self.file.write(text)
        return self.stream.write(text)
    def flush(self):
        self.stream.flush()
sys.stdout = Tee()
forward = net.forward
def speak(x):
    print("forward")
    return forward(x)
net.forward = speak
train(net, optimizer)
""",
    "stderr closed": SGD + "sys.stderr.close()\ntrain(net, optimizer)",
    "float64 as default": "import torch\ntorch.set_default_dtype(torch.float64)\n"
    + SGD
    + "train(net, optimizer)",
    "torch.compile": SGD
    + """
net.compile(backend="eager")
other = torch.compile(Net(), backend="eager")
train(net, optimizer, 3, bad=1)
train(other, torch.optim.SGD(other.parameters(), 0.1), 3, bad=1)
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all scripts have run."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / name).mkdir()
        (folder / name / "script.py").write_text(text)
    root = pathlib.Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "tests.debug.both_ways", str(folder)], cwd=root, check=True
    )
    return folder


def files_in(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "apex-debug" not in file.parts
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_it_is(folder, name):
    plain, watched = folder / name / "plain", folder / name / "debug"
    said = (watched / "stderr").read_text()
    for what in ("stdout", "code"):
        assert (watched / what).read_text() == (plain / what).read_text(), said
    assert files_in(watched / "files") == files_in(plain / "files")
    lines = [one for one in (plain / "stderr").read_text().splitlines() if "Warning" in one]
    assert [one for one in said.splitlines() if "Warning" in one] == lines
    report = watched / "files" / "apex-debug" / "report.json"
    assert report.exists() == (name != "healthy"), said
