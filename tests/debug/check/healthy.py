"""Programs without a mistake that look like one, each after ``planted.HEAD``."""

NETWORK = """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)){cast}
{make}
for step in range(8):
    x = torch.randn(16, 8)
    loss = F.mse_loss(net(x.to(net[0].weight.dtype)).float(), x[:, :1])
    opt.zero_grad()
    {backward}
    opt.step()
"""
SCALED = """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(6):
    for _ in range(2):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", torch.float16):
            y = net(x)
        loss = F.mse_loss(y.float(), x[:, :1])
        BACKWARD
    REST
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
"""


def network(make, cast=".bfloat16()", backward="loss.backward()"):
    return NETWORK.format(make=make, cast=cast, backward=backward)


def scaled(rest="pass", backward="scaler.scale(loss / 2).backward()"):
    return SCALED.replace("BACKWARD", backward).replace("REST", rest)


def amp(level):
    make = f"""
from apex import amp
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
net, opt = amp.initialize(net, opt, opt_level="{level}", verbosity=0)
schedule = torch.optim.lr_scheduler.StepLR(opt, 10)
"""
    backward = """
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
    amp.clip_grad_norm_(opt, 1.0)
"""
    save = "torch.save([opt.state_dict(), schedule.state_dict(), amp.state_dict()], io.BytesIO())"
    return network(make, "", backward.strip()) + save + "\n"


def ours(storage):
    return network(f"""
from apex.optimizers import FusedAdam
opt = FusedAdam(net.parameters(), lr=1e-5, storage="{storage}")
""")


KAHAN = """
class Kahan(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["rest"] = torch.zeros_like(p)
            state["rest"].add_(p.grad, alpha=-1e-4)
            before = p.clone()
            p.add_(state["rest"])
            state["rest"].add_(before.sub_(p))
opt = Kahan(net.parameters(), {})
"""
STOCHASTIC = """
class Stochastic(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            new = p.float() - 1e-4 * p.grad.float()
            bits = new.view(torch.int32) + torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
            p.copy_((bits & -65536).view(torch.float32))
opt = Stochastic(net.parameters(), {})
"""
HEALTHY = {
    "kahan": network(KAHAN),
    "stochastic": network(STOCHASTIC),
    **{f"fused_adam_{name}": ours(name) for name in ("low_bits", "kahan", "stochastic")},
    **{f"amp_{level}": amp(level) for level in ("O1", "O2", "O4", "O5")},
    "optimizer_that_skips_what_is_not_finite": network("""
class Skips(torch.optim.SGD):
    def step(self):
        if all(bool(p.grad.isfinite().all()) for p in self.param_groups[0]["params"]):
            super().step()
opt = Skips(net.parameters(), lr=0.5, momentum=0.9)
""", backward="(loss * (float('inf') if step % 2 else 1)).backward()"),
    "label_smoothing": """
net = nn.Linear(8, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(16, 8), torch.arange(16) % 4
    loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "amp_beside_a_model_without_it": """
from apex import amp
one, two = net = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
both = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, two)]
one, opt = amp.initialize(one, both[0], opt_level="O2", verbosity=0)
for step in range(6):
    x = torch.randn(16, 8)
    loss = F.mse_loss(one(x).float(), x[:, :1])
    F.mse_loss(two(x), x[:, 1:2]).backward()
    with amp.scale_loss(loss, opt) as scaled_loss:
        scaled_loss.backward()
    for optimizer in both:
        optimizer.step()
        optimizer.zero_grad()
""",
    "amp_init_of_two_models": """
from apex import amp
handle = amp.init()
one, two = net = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)])
opts = [handle.wrap_optimizer(torch.optim.Adam(net.parameters(), 1e-3)) for net in (one, two)]
for step in range(6):
    fake = one(torch.randn(16, 8))
    for opt, x in zip(opts, (fake, fake.detach())):
        with opt.scale_loss(0.1 * F.mse_loss(two(x).float(), torch.ones(16, 1))) as scaled_loss:
            scaled_loss.backward()  # the first one writes gradients of both
        opt.step()
        opt.zero_grad()
""",
    "rate_of_zero": network(
        "opt = torch.optim.SGD(net.parameters(), lr=0.5)\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.0)"
    ),
    "accumulation": scaled(),
    "logged_norm_by_the_scale": scaled(
        "print(float(norm(net.parameters())) / scaler.get_scale())\n"
        "    for p in net.parameters(): p.grad.div_(2)"
    ),
    "clamp_after_unscale": scaled(
        "scaler.unscale_(opt)\n    for p in net.parameters(): p.grad.clamp_(-0.1, 0.1)"
    ),
    "scaled_by_hand": scaled(backward="(scaler.scale(loss) if step == 0 else loss * "
                             "scaler.get_scale()).backward()"),
    "limit_times_the_scale": scaled(
        "nn.utils.clip_grad_norm_(net.parameters(), 0.1 * scaler.get_scale())"
    ),
    "scale_saved_by_itself": scaled().replace("256.0", "2.0**24").replace("(6)", "(20)")
    + "state = scaler.state_dict()\ntorch.save(opt.state_dict(), io.BytesIO())\n",
    "schedule_that_follows_from_its_rate": """
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
for step in range(6):
    x = torch.randn(16, 8)
    F.mse_loss(net(x), x[:, :1]).backward()
    opt.step()
    schedule.step()
    opt.zero_grad()
torch.save(opt.state_dict(), io.BytesIO())
""",
    "scale_that_falls": scaled().replace("256.0", "2.0**24").replace("(6)", "(20)"),
    "optimizer_replaced_when_the_scale_had_fallen": scaled().replace("256.0", "2.0**24") + scaled(),
    "batch_with_a_nan_at_the_end": scaled("if step == 5: opt.param_groups[0]['params'][0].grad *= "
                                          "float('nan')"),
    "batches_with_a_nan_loss": scaled(
        backward="scaler.scale(loss * (1 if step % 3 else float('nan'))).backward()"),
    "gradient_penalty_outside_of_the_block": network(
        "from apex import amp\nopt = torch.optim.Adam(net.parameters(), lr=1e-4)\n"
        'net, opt = amp.initialize(net, opt, opt_level="O1", verbosity=0)', "",
        "(0.01 * sum(p.square().sum() for p in net.parameters())).backward()\n"
        "    with amp.scale_loss(loss, opt) as scaled_loss: scaled_loss.backward()"),
    "average_of_the_loss_in_float16": """
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=1e-4)
mean = torch.tensor(0.0).half()
for step in range(20):
    x = torch.randn(16, 8)
    loss = 1 + F.mse_loss(net(x), x[:, :1])
    mean = 0.99 * mean + 0.01 * loss.detach().half()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(mean)
""",
    "schedule_that_writes_momentums": """
net = nn.Linear(8, 1)
opt = torch.optim.AdamW(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=20)
for step in range(12):
    x = torch.randn(16, 8)
    F.mse_loss(net(x), x[:, :1]).backward()
    opt.step()
    schedule.step()
    opt.zero_grad()
    if step == 6:
        torch.save([opt.state_dict(), {"schedule": schedule.state_dict()}], io.BytesIO())
""",
    "tensors_without_numbers": """
with torch.device("meta"):
    net = nn.Sequential(nn.Linear(8, 4).half(), nn.BatchNorm1d(4).bfloat16())
    torch.arange(600, dtype=torch.bfloat16).mul_(0.9).add_(1)
    net[0](torch.ones(2, 8).half()).sum().backward()
net.float().to_empty(device="cpu")
for one in net.state_dict().values(): one.fill_(0.1)
table = torch.eye(8).half().to_sparse()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    opt.zero_grad()
    net[0](torch.randn(4, 8) + (table * 2).to_dense().float()[:4]).square().mean().backward()
    opt.step()
""",
    "mask_of_minus_infinity": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
    def forward(self, x):
        w = self.q(x) @ self.k(x).transpose(1, 2) / 4
        later = torch.ones(w.shape[-2:], dtype=torch.bool).triu(1)
        w = w.masked_fill(later, float("-inf")) + later.to(w.dtype) * -1e4
        return self.out(torch.softmax(w, -1) @ x).mean(1)
net = Attention()
opt = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cpu")
for step in range(6):
    x = torch.randn(4, 20, 16)
    with torch.autocast("cpu", torch.float16):
        y = net(x)
    opt.zero_grad()
    scaler.scale(F.mse_loss(y.float(), x[:, 0, :1])).backward()
    scaler.step(opt)
    scaler.update()
""",
    "truncated_recurrence": """
net = nn.GRUCell(8, 16)
opt = torch.optim.SGD(net.parameters(), lr=0.5)
h = torch.zeros(4, 16)
for step in range(8):
    loss = 0
    for _ in range(4):
        x = torch.randn(4, 8)
        with torch.autocast("cpu", torch.bfloat16):
            h = net(x, h)
        loss = loss + F.mse_loss(h.float()[:, :8], x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    h = h.detach()
""",
    "two_optimizers": """
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
one, two = (torch.optim.SGD(part.parameters(), lr=0.01) for part in net)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
for step in range(6):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", torch.float16):
        y = net(x)
    scaler.scale(y.float().square().mean()).backward()
    for opt in (one, two):
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1.0)
        scaler.step(opt)
    scaler.update()
    net.zero_grad()
""",
    "wound_forward": """
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
for _ in range(3):
    schedule.step()
for step in range(6):
    x = torch.randn(16, 8)
    F.mse_loss(net(x), x[:, :1]).backward()
    opt.step()
    schedule.step()
    opt.zero_grad()
""",
    "chained_schedules": """
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.5)
parts = [LinearLR(opt, 0.1, total_iters=3), CosineAnnealingLR(opt, 9)]
schedule = SequentialLR(opt, parts, [3])
for step in range(8):
    x = torch.randn(16, 8)
    F.mse_loss(net(x), x[:, :1]).backward()
    opt.step()
    schedule.step()
    opt.zero_grad()
torch.save({"all": {"opt": opt, "schedule": schedule}}, io.BytesIO())
""",
}  # fmt: skip
