"""Programs with a planted mistake, whose line is marked, and their clean twins.

``Planted.text`` has ``#!`` at the line that is to be named. ``clean`` are the replacements that
make it the twin.
"""

from typing import NamedTuple

HEAD = """
import copy, io, torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
"""


class Planted(NamedTuple):
    """A program with one mistake."""

    kind: str
    text: str
    clean: dict[str, str]


def _scaled(after_backward, loss="F.mse_loss(y.float(), x[:, :1])", scale="init_scale=256.0"):
    """A loop with float16 autocast and a GradScaler; what comes between backward and the step."""
    lines = "\n".join(f"    {line}" for line in after_backward.splitlines())
    return f"""
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", {scale})
for step in range(8):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        y = net(x)
    loss = {loss}
    scaler.scale(loss).backward()
{lines}
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
"""


def _averaged(make, update):
    """A training in float32 with an average of its weights."""
    lines = "\n".join(f"    {line}" for line in update.splitlines())
    return f"""
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
{make}
for step in range(8):
    x = torch.randn(16, 8)
    loss = F.mse_loss(net(x), x[:, :1])
    opt.zero_grad()
    loss.backward()
    opt.step()
{lines}
"""


_UNSCALE = "scaler.unscale_(opt)\n    "
_BY_HAND = """
norm = torch.sqrt(sum(p.grad.detach().pow(2).sum() for p in net.parameters()))
for p in net.parameters():
    p.grad.data.mul_(min(1.0, 1.0 / float(norm))) #!
"""
_WEIGHTS = """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).bfloat16()
opt = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.0)
for step in range(6):
    x = torch.randn(16, 8).to(net[0].weight.dtype)
    loss = F.mse_loss(net(x).float(), x[:, :1].float())
    opt.zero_grad()
    loss.backward()
    opt.step() #!
"""
_MOMENTS = """
class Lean(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=1e-3))
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["scale"] = torch.zeros_like(p, dtype=torch.bfloat16)
            state["scale"].mul_(0.999).add_((0.001 * p.grad.square()).to(state["scale"].dtype))
            p -= 1e-3 * p.grad / (state["scale"].float().sqrt() + 1e-8)
net = nn.Linear(20, 20)
opt = Lean(net.parameters())
for step in range(20):
    x = torch.randn(16, 20) * (1.0 if step < 3 else 0.3)
    loss = F.mse_loss(net(x), x.sin())
    opt.zero_grad()
    loss.backward()
    opt.step() #!
"""
_AMP = """
from apex import amp
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
net, opt = amp.initialize(net, opt, opt_level="O2", verbosity=0)
for step in range(6):
    x = torch.randn(16, 8)
    loss = F.mse_loss(net(x).float(), x[:, :1])
    opt.zero_grad()
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    amp.clip_grad_norm_(opt, 0.01)
    opt.step()
"""
_BLOCK = """    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    amp.clip_grad_norm_(opt, 0.01)
"""
_SKIPS = """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.001)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
for step in range(12):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        y = net(x)
    scaler.scale(F.mse_loss(y.float(), x[:, :1])).backward()
    scaler.step(opt)
    before = scaler.get_scale()
    scaler.update()
    schedule.step() #!
    opt.zero_grad()
torch.save([opt.state_dict(), scaler.state_dict(), schedule.state_dict()], io.BytesIO()) #2
"""
_RESUMES = (
    _SKIPS.replace(" #!", "")
    .replace("schedule.step()", "before <= scaler.get_scale() and schedule.step()")
    .replace("torch.save([opt", "file = io.BytesIO()\ntorch.save([opt")
    .replace(
        "io.BytesIO()) #2", "file)\nfile.seek(0)\nof_opt, of_scaler, of_schedule = torch.load(file)"
    )
)
_AGAIN = """
opt = torch.optim.SGD(net.parameters(), lr=0.001)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
opt.load_state_dict(of_opt) #!
scaler.load_state_dict(of_scaler)
schedule.load_state_dict(of_schedule)
for step in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        y = net(x)
    scaler.scale(F.mse_loss(y.float(), x[:, :1])).backward()
    scaler.step(opt)
    scaler.update()
    schedule.step()
"""
_BFLOAT16 = """
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
def negative(logits, labels):
    return -torch.log(torch.softmax(logits, -1)).gather(1, labels[:, None]).float().mean() #!
for step in range(20):
    labels = torch.randint(0, 8, (128,))
    x = 0.2 * torch.randn(128, 8)
    x[torch.arange(128), labels] += 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
    loss = negative(logits, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
