"""Programs with a planted mistake, and their twins without it.

In ``Planted.text`` the line that is to be named ends with ``#!``. Lines that begin with ``#T`` are
run in a plain run alone: they put into ``true`` what is to be measured, or that by step. ``clean``
has what is replaced in the twin; ``measured`` is a part of what is printed, with places for
``true``.
"""

from typing import NamedTuple

HEAD = """
import copy, io, torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
true = []
def norm(params):
    return float(torch.stack([p.grad.double().norm() for p in params]).norm())
def stood(before, after, grads):
    pairs = [(b == a)[g != 0] for b, a, g in zip(before, after, grads)]
    return 100 * float(torch.cat([one.flatten() for one in pairs]).double().mean())
"""
TAIL = """
for one in net.parameters():
    print(one.tolist())
"""


class Planted(NamedTuple):
    """A program with one mistake."""

    kind: str
    text: str
    clean: dict[str, str]
    measured: str = ""
    fails: bool = False  # because of the mistake
    fix: str = ""  # the first line of it, where the table's does not fit

    def program(self, *, twin=False, true=False):
        """The text of a script: the planted one or its twin; with the lines of a plain run."""
        text = self.text
        for old, new in self.clean.items() if twin else ():
            assert old in text
            text = text.replace(old, new)
        text = text.replace("#T ", "") if true else text
        return HEAD + text.replace(" #!", "") + TAIL

    def line(self):
        """The number of the marked line."""
        (number,) = [i for i, one in enumerate((HEAD + self.text).splitlines(), 1) if "#!" in one]
        return number


def indented(text):
    return "\n".join(f"    {line}" for line in text.strip("\n").splitlines())


def scaled(
    between="",
    make="",
    backward="scaler.scale(loss).backward()",
    step="scaler.step(opt)\nscaler.update()",
    scaler="init_scale=256.0",
):
    """A loop in float16 autocast with a GradScaler; ``between`` comes before the step."""
    return f"""
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", {scaler})
{make}
for step in range(8):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        y = net(x)
    loss = F.mse_loss(y.float(), x[:, :1])
{indented(backward)}
{indented(between)}
{indented(step)}
    opt.zero_grad()
"""


def averaged(make, update, steps=8):
    """A training in float32 with an average of its weights."""
    return f"""
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
{make}
for step in range({steps}):
    x = torch.randn(16, 8)
    loss = F.mse_loss(net(x), x[:, :1])
    opt.zero_grad()
    loss.backward()
    opt.step()
{indented(update)}
"""


PLANTED = {}

# --- scales --------------------------------------------------------------------------------------


def unscaled(line):
    return {line: f"scaler.unscale_(opt)\n    {line}"}


PLANTED["clip_grad_norm"] = Planted(
    "clip-before-unscale",
    scaled(
        "#T true += [norm(net.parameters()), norm(net.parameters()) / 256]\n"
        "nn.utils.clip_grad_norm_(net.parameters(), 1.0) #!"
    ),
    unscaled("nn.utils.clip"),
    "step 1: the norm was {0:.4g}, without the loss scale {1:.4g}; clipped to 0.0039 instead of 1 "
    "(8 of 8 steps)",
)
PLANTED["clip_grad_value"] = Planted(
    "clip-before-unscale",
    scaled("clip(net.parameters(), clip_value=0.5) #!", "from torch.nn.utils import "
           "clip_grad_value_ as clip"),
    unscaled("clip(net"),
    "clipped to 0.002 instead of 0.5",
)  # fmt: skip
PLANTED["clip_with_total_norm"] = Planted(
    "clip-before-unscale",
    scaled(
        "total = nn.utils.get_total_norm([p.grad for p in net.parameters()])\n"
        "nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, total) #!"
    ),
    unscaled("total ="),
    "clipped to 0.0039 instead of 1",
)
PLANTED["clip_by_hand"] = Planted(
    "clip-before-unscale",
    scaled("""
#T true += [norm([net[0].weight]), norm([net[0].weight]) / 256, 1 / norm(net.parameters())]
total = torch.sqrt(sum(p.grad.detach().pow(2).sum() for p in net.parameters()))
for p in net.parameters():
    p.grad.data.mul_(min(1.0, 1.0 / float(total))) #!
"""),
    unscaled("total ="),
    "step 1: a gradient with the norm {0:.4g}, which is {1:.4g} without the scale, was multiplied "
    "by {2:.3g}",
)
PLANTED["clip_foreach"] = Planted(
    "clip-before-unscale",
    scaled("""
grads = [p.grad for p in net.parameters()]
total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
torch._foreach_mul_(grads, torch.clamp(1.0 / (total + 1e-6), max=1.0)) #!
"""),
    unscaled("grads ="),
    "was multiplied by",
)
PLANTED["clip_and_assign"] = Planted(
    "clip-before-unscale",
    scaled("""
#T true += [int((net[0].weight.grad.abs() > 0.05).sum())]
for p in net.parameters():
    p.grad = p.grad.clamp(-0.05, 0.05) #!
"""),
    unscaled("for p in"),
    "step 1: clipped {0} of 256 elements of a gradient that is multiplied by 256",
)
PLANTED["clip_in_a_hook"] = Planted(
    "clip-before-unscale",
    scaled(
        make="""
for p in net.parameters():
    p.register_hook(lambda grad: torch.clamp(grad, -0.1, 0.1)) #!
"""
    ),
    {"-0.1, 0.1": "-0.1 * scaler.get_scale(), 0.1 * scaler.get_scale()"},
    "elements of a gradient that is multiplied by 256",
)
PLANTED["step_without_scale"] = Planted(
    "step-without-scale",
    scaled(
        backward="scaler.scale(loss)\nloss.backward()",
        step="scaler.step(opt) #!\nscaler.update()",
    ),
    {"scaler.scale(loss)\n    loss.backward()": "scaler.scale(loss).backward()"},
    "step 1: gradients are 256 times too small",
)
TWICE = "scaler.scale(loss).backward(retain_graph=True)\n"
PLANTED["second_backward_unscaled"] = Planted(
    "one-loss-unscaled",
    scaled(backward=TWICE + "(0.1 * y.float().square().mean()).backward() #!"),
    {"(0.1 * y.float().square().mean())": "scaler.scale(0.1 * y.float().square().mean())"},
    "step 1: its gradients are 256 times too small in 4 of 4 parameters",
)
PLANTED["sum_of_scaled_and_unscaled"] = Planted(
    "one-loss-unscaled",
    scaled(backward="penalty = 0.01 * sum(p.square().sum() for p in net.parameters())\n"
           "(scaler.scale(loss) + penalty).backward() #!"),
    {"scaler.scale(loss) + penalty": "scaler.scale(loss + penalty)"},
    "one part of the loss is multiplied by 256, and another part is not",
)  # fmt: skip
PLANTED["scaled_step"] = Planted(
    "scaled-step",
    scaled(step="opt.step() #!").replace("lr=0.1", "lr=1e-5"),
    {"opt.step() #!": "scaler.step(opt)\n    scaler.update()"},
    "step 1: gradients are 256 times too large in 4 of 4 parameters",
)
PLANTED["scaled_step_that_explodes"] = Planted(
    "scaled-step",
    scaled(step="opt.step() #!"),
    {"opt.step() #!": "scaler.step(opt)\n    scaler.update()"},
    "step 1: gradients are 256 times too large in 4 of 4 parameters",
)
PLANTED["unscale_amid_accumulation"] = Planted(
    "added-after-unscale",
    scaled(
        "scaler.unscale_(opt)\nscaler.scale(y.float().square().mean()).backward() #!",
        backward=TWICE,
    ),
    {"scaler.unscale_(opt)\n    ": ""},
    "gradients added after unscale_() count 256 times as much as those added before",
)
PLANTED["no_zero_grad"] = Planted(
    "added-after-unscale",
    scaled(backward="scaler.scale(loss).backward() #!").replace(
        "    opt.zero_grad()\n", "    pass\n"
    ),
    {"    pass\n": "    opt.zero_grad()\n"},
    "step 2: gradients added after unscale_() count 256 times as much as those of the last step, "
    "in 4 of 4",
    fix="optimizer.zero_grad()",
)
PLANTED["update_for_each_optimizer"] = Planted(
    "update-before-step",
    """
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
one, two = (torch.optim.SGD(part.parameters(), lr=0.01) for part in net)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
for step in range(8):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", torch.float16):
        y = net(x)
    scaler.scale(y.float().square().mean()).backward()
    scaler.step(one)
    scaler.update()
    scaler.step(two) #!
    scaler.update()
    net.zero_grad()
""",
    {"scaler.step(one)\n    scaler.update()": "scaler.step(one)"},
    "step 2: gradients were multiplied by 64 and divided by 128",
)
PLANTED["float16_weights"] = Planted(
    "float16-weights-under-scaler",
    scaled(make="net.half() #!"),
    {"net.half() #!": ""},
    "4 of 4 parameters are float16, and unscale_() raised: Attempting to unscale FP16 gradients.",
    fails=True,
)

# --- apex.amp ------------------------------------------------------------------------------------

AMP = """
from apex import amp
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-4)
net, opt = amp.initialize(net, opt, opt_level="O2", init_scale=1024.0, verbosity=0)
for step in range(6):
    x = torch.randn(16, 8)
    loss = F.mse_loss(net(x).float(), x[:, :1])
    opt.zero_grad()
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    amp.clip_grad_norm_(opt, 0.01)
    opt.step()
"""
CLIPS = "    amp.clip_grad_norm_(opt, 0.01)\n"
BLOCK = f"    with amp.scale_loss(loss, opt) as scaled:\n        scaled.backward()\n{CLIPS}"
PLANTED["amp_backward_outside"] = Planted(
    "backward-outside-scale-loss",
    AMP.replace(BLOCK, "    loss.backward() #!\n"),
    {"    loss.backward() #!\n": BLOCK},
    "step 1: the loss was not multiplied by the loss scale, 1024",
)
PLANTED["amp_backward_outside_at_O1"] = Planted(
    "backward-outside-scale-loss",
    AMP.replace(BLOCK, "    loss.backward() #!\n").replace('"O2"', '"O1"'),
    {"    loss.backward() #!\n": BLOCK},
    "step 1: the loss was not multiplied by the loss scale, 1024",
)
PLANTED["amp_clips_the_model"] = Planted(
    "clip-of-model-gradients",
    AMP.replace(
        CLIPS,
        "    nn.utils.clip_grad_norm_(net.parameters(), 0.01) #!\n"
        "    #T true.append(norm(amp.master_params(opt)))\n",
    ),
    {"nn.utils.clip_grad_norm_(net.parameters(), 0.01)": "amp.clip_grad_norm_(opt, 0.01)"},
    "the norm of the masters' gradients is {0:.4g} after it, and the limit is 0.01",
)

# --- steps and weights ---------------------------------------------------------------------------

PLANTED["static_scale_overflows"] = Planted(
    "not-finite-step",
    """
net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(16, 6)
    with torch.autocast("cpu", torch.float16):
        y = net(x)
    (F.mse_loss(y.float(), 4 * x[:, :1]) * 2.0**20).backward()
    for p in net.parameters():
        p.grad.div_(2.0**20)
    #T true.append(sum(int((~p.grad.isfinite()).sum()) for p in net.parameters()))
    opt.step() #!
    opt.zero_grad()
""",
    {"2.0**20": "2.0**8"},
    "step 1: {0} of 257",
)
PLANTED["eps_is_zero"] = Planted(
    "update-not-finite",
    """
net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).half()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(4):
    words = torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(words).float(), words)
    opt.zero_grad()
    loss.backward()
    opt.step() #!
    #T true.append(sum(int((~p.isfinite()).sum()) for p in net.parameters()))
""",
    {".half()": ""},
    "step 1: the update made {0} of 340 weights NaN or inf",
)
WEIGHTS = """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).bfloat16()
opt = torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.0)
for step in range(6):
    x = torch.randn(16, 8).to(net[0].weight.dtype)
    def loss_of():
        opt.zero_grad()
        loss = F.mse_loss(net(x).float(), x[:, :1].float())
        loss.backward()
        return loss
    #T before = copy.deepcopy([*net.parameters()])
    loss_of()
    opt.step() #!
    #T true += [stood(before, net.parameters(), [p.grad for p in net.parameters()])]
"""
OURS = "apex.optimizers.FusedAdam(net.parameters(), lr=1e-5, storage='plain')"
PLANTED["bfloat16_weights"] = Planted(
    "update-lost",
    WEIGHTS,
    {".bfloat16()": ""},
    "step 1: {0:.3g} % of the bfloat16 weights with a gradient did not move",
)
PLANTED["bfloat16_weights_closure"] = Planted(
    "update-lost",
    WEIGHTS.replace("    loss_of()\n    opt.step()", "    opt.step(loss_of)"),
    {".bfloat16()": ""},
    "step 1: {0:.3g} % of the bfloat16 weights with a gradient did not move",
)
PLANTED["float16_weights_sgd"] = Planted(
    "update-lost",
    WEIGHTS.replace("bfloat16()", "half()").replace(
        "torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.0)",
        "torch.optim.SGD(net.parameters(), lr=1e-4)",
    ),
    {".half()": ""},
    "step 1: {0:.3g} % of the float16 weights with a gradient did not move",
)
PLANTED["bfloat16_weights_of_apex"] = Planted(
    "update-lost",
    "import apex\n"
    + WEIGHTS.replace("torch.optim.AdamW(net.parameters(), lr=1e-5, weight_decay=0.0)", OURS),
    {"'plain'": "'low_bits'"},
    "step 1: {0:.3g} % of the bfloat16 weights with a gradient did not move",
)
PLANTED["bfloat16_second_moment"] = Planted(
    "moments-lost",
    """
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
    #T before = [opt.state[p]["scale"].clone() if opt.state[p] else p for p in net.parameters()]
    opt.step() #!
    #T after = [opt.state[p]["scale"] for p in net.parameters()]
    #T true += [stood(before, after, [p.grad for p in net.parameters()])]
""",
    {"dtype=torch.bfloat16": "dtype=torch.float32"},
    "step 4: {3:.3g} % of the bfloat16 elements of 'scale' with a gradient did not move",
)

# --- schedules and checkpoints -------------------------------------------------------------------

SAVE = "torch.save([opt.state_dict(), scaler.state_dict(), schedule.state_dict()], file)"
SCHEDULE = "schedule.step()"
UNSKIPPED = "before <= scaler.get_scale() and schedule.step()"


def scheduled(step=UNSKIPPED, save=SAVE, load=""):
    """A training whose first steps are skipped, then a checkpoint, and perhaps a resumed run."""
    return f"""
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
def make():
    opt = torch.optim.SGD(net.parameters(), lr=0.001)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    return opt, schedule, torch.amp.GradScaler("cpu", init_scale=2.0**22)
def train(steps):
    for _ in range(steps):
        x = torch.randn(16, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            y = net(x)
        scaler.scale(F.mse_loss(y.float(), x[:, :1])).backward()
        scaler.step(opt)
        before = scaler.get_scale()
        scaler.update()
        #T true.append(scaler.get_scale() < before)
        {step}
        opt.zero_grad()
opt, schedule, scaler = make()
train(12)
file = io.BytesIO()
{save}
{load}
"""


RESUME = """
file.seek(0)
of_opt, of_scaler, of_schedule = torch.load(file)
opt, schedule, scaler = make()
opt.load_state_dict(of_opt) #!
scaler.load_state_dict(of_scaler)
schedule.load_state_dict(of_schedule)
#T true = [of_scaler["scale"], of_schedule["last_epoch"]]
train(3)
"""


def without(part, text):
    """A text without the state of ``part``."""
    return text.replace(f", {part}.state_dict()", "").replace(
        f"{part}.load_state_dict(of_{part})\n", ""
    )


PLANTED["schedule_counts_skipped_steps"] = Planted(
    "scheduler-counts-skipped",
    scheduled(SCHEDULE + " #!"),
    {SCHEDULE: UNSKIPPED},
    "1 of 2 steps had been skipped, so the learning rate was 0.0005 instead of 0.001",
)
PLANTED["schedule_first"] = Planted(
    "scheduler-before-optimizer",
    """
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.2)
schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
for step in range(6):
    x = torch.randn(16, 8)
    F.mse_loss(net(x), x[:, :1]).backward()
    schedule.step() #!
    opt.step()
    opt.zero_grad()
""",
    {"    schedule.step() #!\n    opt.step()": "    opt.step()\n    schedule.step()"},
    "the first learning rate, 0.2, was never used",
)
PLANTED["scaler_not_saved"] = Planted(
    "scaler-not-saved",
    scheduled(save=without("scaler", SAVE) + " #!\n#T true = [scaler.get_scale()]"),
    {without("scaler", SAVE): SAVE},
    "the scale is {0:g} now; a resumed run starts at 4.1943e+06",
)
PLANTED["schedule_not_saved"] = Planted(
    "scheduler-not-saved",
    scheduled(save=without("schedule", SAVE) + " #!\n"
              '#T true = [opt.param_groups[0]["lr"], schedule.last_epoch]'),
    {without("schedule", SAVE): SAVE},
    "the learning rate is {0:.4g}; a resumed run begins the schedule at 0.001",
)  # fmt: skip
PLANTED["pickled_without_scaler"] = Planted(
    "scaler-not-saved",
    scheduled(save=without("scaler", SAVE).replace("torch.save(", "import pickle; pickle.dump(")
              + " #!"),
    {"[opt.state_dict(), ": "[opt.state_dict(), scaler.state_dict(), "},
    "a resumed run starts at 4.1943e+06",
)  # fmt: skip
PLANTED["scaler_not_loaded"] = Planted(
    "scaler-not-loaded",
    scheduled(load=without("scaler", RESUME)),
    {"schedule.load_state": "scaler.load_state_dict(of_scaler)\nschedule.load_state"},
    "the checkpoint has the scale {0:g}, and this run continued at 4.1943e+06",
)
AMP_RESUMED = """
from apex import amp
def make():
    net = nn.Linear(8, 1)
    opt = torch.optim.SGD(net.parameters(), lr=1e-3)
    return amp.initialize(net, opt, opt_level="{level}", init_scale=2.0**22, verbosity=0)
def train(steps):
    for _ in range(steps):
        x = torch.randn(16, 8)
        opt.zero_grad()
        with amp.scale_loss(F.mse_loss(net(x).float(), x[:, :1]), opt) as scaled_loss:
            scaled_loss.backward()
        opt.step()
net, opt = make()
train(20)
file = io.BytesIO()
torch.save({{"opt": opt.state_dict(), "amp": amp.state_dict()}}, file) #saves
#T true = [amp.state_dict()["loss_scaler0"]["loss_scale"]]
net, opt = make()
file.seek(0)
saved = torch.load(file)
opt.load_state_dict(saved["opt"]) #loads
amp.load_state_dict(saved["amp"])
train(20)
"""
for level in ("O1", "O2"):
    text = AMP_RESUMED.format(level=level)
    head = text.replace("#saves", "#!").partition("net, opt = make()\nfile")[0]
    PLANTED[f"amp_{level}_not_saved"] = Planted(
        "scaler-not-saved",
        head.replace(', "amp": amp.state_dict()', ""),
        {'{"opt": opt.state_dict()': '{"opt": opt.state_dict(), "amp": amp.state_dict()'},
        "the scale is {0:g} now; a resumed run starts at 4.1943e+06",
        fix='"amp": amp.state_dict()',
    )
    PLANTED[f"amp_{level}_not_loaded"] = Planted(
        "scaler-not-loaded",
        text.replace("#loads", "#!")
        .replace(" #saves", "")
        .replace('amp.load_state_dict(saved["amp"])', "pass"),
        {"pass": 'amp.load_state_dict(saved["amp"])'},
        "the checkpoint has the scale {0:g}, and this run continued at 4.1943e+06",
        fix='amp.load_state_dict(checkpoint["amp"])',
    )
PLANTED["schedule_not_loaded"] = Planted(
    "scheduler-not-loaded",
    scheduled(load=without("schedule", RESUME)),
    {"scaler.load_state": "schedule.load_state_dict(of_schedule)\nscaler.load_state"},
    "the checkpoint has a schedule with the count {1:g}, and this run continued at 0",
)

# --- autocast ------------------------------------------------------------------------------------

PLANTED["block_around_all_steps"] = Planted(
    "stale-autocast-cache",
    """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
with torch.autocast("cpu", dtype=torch.bfloat16):
    for step in range(6):
        x = torch.randn(16, 8)
        y = net(x) #!
        with torch.autocast("cpu", enabled=False):
            F.mse_loss(y.float(), x[:, :1]).backward()
        opt.step()
        opt.zero_grad()
""",
    {"dtype=torch.bfloat16)": "dtype=torch.bfloat16, cache_enabled=False)"},
    "step 2: 1 steps had no effect on this forward",
)
PLANTED["backward_in_the_block"] = Planted(
    "backward-in-autocast",
    """
net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 24))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
def contrastive(a, b):
    with torch.autocast("cpu", enabled=False):
        u, v = F.normalize(a.float(), dim=1), F.normalize(b.float(), dim=1)
        return F.cross_entropy(u @ v.t() / 0.1, torch.arange(len(u)))
def grads(loss, inside):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        some = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
    return torch.cat([one.flatten() for one in some]).double()
for step in range(6):
    x = torch.randn(64, 16)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = contrastive(net(x + 1.5 * torch.randn_like(x)), net(x))
        #T right = grads(loss, False)
        #T true.append(100 * float((grads(loss, True) - right).norm() / right.norm()))
        loss.backward() #!
    opt.step()
""",
    {"        loss.backward()": "    loss.backward()"},
    "step 1: gradients differ by {0:.2g} % (norm of the difference)",
)
PLANTED["block_around_the_loss"] = Planted(
    "autocast-around-nothing",
    """
net = nn.Linear(8, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    x = torch.randn(16, 8)
    y = net(x)
    with torch.autocast("cpu", dtype=torch.bfloat16): #!
        loss = F.mse_loss(y.float(), x[:, :1])
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    {"    y = net(x)\n": "", "        loss": "        y = net(x)\n        loss"},
    "6 forwards ran in float32; the block was entered 6 times",
)
PLANTED["float16_without_scaler"] = Planted(
    "float16-without-scaler",
    """
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
def grads(scale):
    some = torch.autograd.grad(scale * loss, [*net.parameters()], retain_graph=True)
    return torch.cat([one.flatten() for one in some])
for step in range(6):
    x = torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.float16): #!
        y = net(x)
    loss = 1e-4 * F.mse_loss(y.float(), x[:, :1])
    #T small, large = grads(1), grads(1024)
    #T true.append(100 * float((small == 0)[large != 0].double().mean()))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    {"1e-4 * F": "F"},
    "step 1: {0:.3g} % of the gradients' elements were 0 and would not be at a scale of 1024",
)

# --- losses --------------------------------------------------------------------------------------


def bfloat16(loss, steps=20):
    """A network in bfloat16 autocast; ``loss`` has the lines of a function of logits, labels."""
    return f"""
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
def loss_of(logits, labels):
{indented(loss)}
for step in range({steps}):
    labels = torch.randint(0, 8, (128,))
    x = 0.2 * torch.randn(128, 8)
    x[torch.arange(128), labels] += 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
    #T leaf = logits.detach().requires_grad_()
    #T losses = [loss_of(leaf, labels), loss_of(leaf.float(), labels)]
    #T ours, right = (torch.autograd.grad(one, leaf)[0].double() for one in losses)
    #T off = 100 * float((ours - right).norm() / right.norm())
    #T true = dict(true)
    #T true[step + 1] = [off, *map(float, losses)]
    loss = loss_of(logits, labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


OFF = (
    "differs by {0:.3g} % from float32 (norm of the difference); "
    "the loss is {1:.5g} instead of {2:.5g}"
)
PLANTED["log_of_softmax"] = Planted(
    "loss-in-16-bits",
    bfloat16("""
p = torch.softmax(logits, -1) #!
return -torch.log(p).gather(1, labels[:, None]).float().mean()
"""),
    {"net(x)": "net(x).float()"},
    OFF,
)
PLANTED["sigmoid_and_logarithm"] = Planted(
    "loss-in-16-bits",
    bfloat16("""
p = torch.sigmoid(4 * logits) #!
y = F.one_hot(labels, 8)
return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).float().mean()
"""),
    {"net(x)": "net(x).float()"},
    OFF,
)

# --- sums and values -----------------------------------------------------------------------------

EMA = "mean = [p.detach().bfloat16() for p in net.parameters()]"
WIDE = {EMA: EMA.replace("bfloat16()", "clone()")}
PLANTED["average_in_place"] = Planted(
    "sum-in-16-bits",
    averaged(EMA, """
for average, p in zip(mean, net.parameters()):
    average.lerp_(p.detach().to(average.dtype), 0.001) #!
"""),
    WIDE,
    "of its elements did not move although the update was not 0, in 7 steps",
)  # fmt: skip
PLANTED["average_anew"] = Planted(
    "sum-in-16-bits",
    averaged(
        "mean = {name: one.bfloat16() for name, one in net.state_dict().items()}",
        """
for name, one in net.state_dict().items():
    mean[name] = 0.999 * mean[name] + 0.001 * one.to(mean[name].dtype) #!
""",
    ),
    {"one.bfloat16()": "one.clone()"},
    "of its elements did not move although the update was not 0",
)
PLANTED["average_foreach"] = Planted(
    "sum-in-16-bits",
    averaged(EMA, "torch._foreach_lerp_(mean, [p.detach().to(mean[0].dtype) for p in "
             "net.parameters()], 0.001) #!"),
    WIDE,
    "of its elements did not move although the update was not 0",
)  # fmt: skip
PLANTED["average_of_torch"] = Planted(
    "sum-in-16-bits",
    averaged(
        """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
mean = AveragedModel(copy.deepcopy(net).bfloat16(), multi_avg_fn=get_ema_multi_avg_fn(0.999))
""",
        "mean.update_parameters(copy.deepcopy(net).to(next(mean.parameters()).dtype)) #!",
    ),
    {".bfloat16()": ""},
    "of its elements did not move although the update was not 0",
)
PLANTED["counter"] = Planted(
    "sum-in-16-bits",
    averaged("seen = torch.tensor(0.0, dtype=torch.float16)", "seen += 128 #!", 20),
    {"dtype=torch.float16": "dtype=torch.float32"},
    "it grows by 128 at each update and is inf above 65504",
)
PLANTED["statistics"] = Planted(
    "batchnorm-in-16-bits",
    """
net = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 1))
net[0].half() #!
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(6):
    x = 3000 * torch.randn(16, 8)
    loss = F.mse_loss(net[1](net[0](x.to(net[0].running_var.dtype)).float()), x[:, :1] / 3000)
    opt.zero_grad()
    loss.backward()
    opt.step()
    #T true.append(int(torch.isinf(net[0].running_var).sum()))
""",
    {"net[0].half()": ""},
    "step 2: {0} of 8 running variances were inf",
)
POSITIONS = """
net = nn.Linear(8, 2)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    places = torch.arange(600).{cast} #!
    #T true.append(len(places.unique()))
    x = torch.randn(600, 8) + torch.sin(places / 10).float()[:, None]
    loss = net(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
PLANTED["positions"] = Planted(
    "whole-numbers-in-16-bits",
    POSITIONS.format(cast="bfloat16()"),
    {"bfloat16()": "float()"},
    "step 1: 600 different numbers became {0} in bfloat16",
)
PLANTED["positions_by_a_product"] = Planted(
    "whole-numbers-in-16-bits",
    POSITIONS.format(cast="float()").replace("torch.sin(places / 10).float()[:, None]",
    "turned(places)").replace(" #!", "").replace("for step", """
def turned(places):
    rate = torch.ones(1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.sin((places[:, None] @ rate).float()) #!
for step""").replace("places.unique()", "places.bfloat16().unique()"),
    {"dtype=torch.bfloat16": "dtype=torch.bfloat16, enabled=False"},
    "step 1: 600 different numbers became {0} in bfloat16",
)  # fmt: skip
PLANTED["squares_overflow"] = Planted(
    "overflow-in-16-bits",
    """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
    def forward(self, x):
        #T true.extend([int(x.float().square().gt(65520).sum()), float(x.float().square().max())])
        size = x.pow(2).mean(-1, keepdim=True) #!
        return (x * torch.rsqrt(size.float() + 1e-5)) * self.weight
net = nn.Sequential(Norm(), nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    x = 200 * torch.randn(64, 8)
    loss = F.mse_loss(net(x.half()), x[:, :1] / 200)
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    {"x.pow(2)": "x.float().pow(2)"},
    "step 1: {0} of 512 values of pow were inf; in float32 the largest is {1:.3g}",
)
PLANTED["loss_overflows_in_the_block"] = Planted(
    "overflow-in-16-bits",
    """
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-6)
for step in range(8):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", torch.float16):
        out = net(x)
        #T true.append(float(out.float().square().sum() * 1e5))
        loss = (out ** 2).sum() * 1e5 #!
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
""",
    {"(out ** 2)": "(out.float() ** 2)"},
    "1 of 1 values of mul were inf; in float32 the largest is",
    fix="compute this line on .float() inputs, outside autocast,",
)
