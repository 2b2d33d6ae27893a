import collections
import dataclasses
import json
import os
import pathlib
import re
import stat
import sys
import types

import pytest
import torch

import apex
from apex._compat import private
from apex.amp.casting import cpu_float16
from apex.commands import command_line as cli
from apex.commands.info import command as info
from apex.commands.info import installs, machine, speeds
from apex.commands.info.clocks import CallTime
from apex.commands.tables import aligned
from apex.ops import _runtime

PYPROJECT = pathlib.Path(__file__).parents[3] / "pyproject.toml"
COMMAND = re.search('^apex = "(.+)"$', PYPROJECT.read_text(), re.MULTILINE).group(1)
CPU = torch.device("cpu")
NONE = ("torch_cuda", "torch_rocm", "cudnn", "driver", "driver_cuda", "nvcc", "nvcc_path")
OPERATIONS = dict(speeds.OPERATIONS)
MISSING = {**dict.fromkeys(NONE), "why_not": "a CPU build"}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Make the PATH hold nothing but what a test puts there: name -> what it prints."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name, script):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)

    return put


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(speeds, "SIZES", {"cpu": (8, 1)})
    monkeypatch.setattr(speeds, "SECONDS", 0)
    # Convolutions in float16 take half a second where the processor has no such instructions.
    monkeypatch.setattr(speeds, "OPERATIONS", dict([next(iter(OPERATIONS.items()))]))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.0, 0.0), raising=False)


# --- the command ---------------------------------------------------------------------------


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(capfd, monkeypatch):
    monkeypatch.setattr(speeds, "OPERATIONS", OPERATIONS)
    assert cli.main(["info", "--json"]) == 0
    out, errors = capfd.readouterr()
    assert errors == ""
    facts = json.loads(out)
    assert facts["versions"]["apex"] == apex.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["missing_private_names"] == {}
    assert facts["devices"][0]["device"] == "cpu"
    assert {half["dtype"] for half in facts["devices"][0]["half_types"]} == {"float16", "bfloat16"}
    assert set(facts["cuda"]) >= {"torch_cuda", "cudnn", "driver", "nvcc"}
    assert len(facts["speeds"]["cpu"]) == 12
    assert all(speed["ms"] > 0 for speed in facts["speeds"]["cpu"])
    assert facts["installs"]["running"] == str(pathlib.Path(OURS, "apex"))


def test_text_says_what_readers_look_up_by_hand(capfd):
    assert cli.main(["info"]) == 0
    out, errors = capfd.readouterr()
    assert errors == ""
    words = ["apex ", "torch ", "triton ", "python ", "cuDNN", "driver", "nvcc", "float16: "]
    assert [word for word in words if word not in out] == []


@pytest.mark.parametrize("missing", [{}, {"torch._x": "it is slower", "torch.y._z": "an error"}])
def test_private_names_that_torch_lacks_are_shown(missing, monkeypatch):
    monkeypatch.setattr(private, "missing", lambda: missing)
    lines = [line.strip() for line in info.draw(info.collect()).splitlines()]
    below = lines[lines.index(f"torch     {torch.__version__}") + 1 :]
    if missing:
        assert below[:2] == ["it has no torch._x: it is slower", "it has no torch.y._z: an error"]
    else:
        assert below[0] == "it has all private names that apex uses"


def test_triton_is_reported_but_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # an import would raise
    report = info.collect()
    assert "Triton" in info.draw(report)


def test_what_torch_warns_about_is_part_of_the_report(monkeypatch):
    def warn():
        import warnings

        warnings.warn("the driver\nis too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    report = info.collect()
    assert report.warnings == ("the driver is too old",)
    assert "the driver is too old" in info.draw(report)


def test_a_busy_machine_is_a_warning(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert info.collect().warnings == ()
    monkeypatch.setattr(os, "getloadavg", lambda: (2.5, 0.0, 0.0), raising=False)
    said = "busy machine (load 2.5 on 4 cores): do not trust the times"
    assert info.collect().warnings == (said,)
    monkeypatch.delattr(os, "getloadavg")  # Windows
    assert machine.busy() is None


def test_a_machine_where_everything_is_missing(tools, monkeypatch):
    def nothing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", nothing)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError()))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: None)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    report = info.collect()
    assert report.versions["triton"] is None
    assert report.cuda["driver"] is None
    assert report.cuda["nvcc"] is None
    assert [half.native for half in report.devices[0].half_types] == [None, None]
    text = info.draw(report)
    assert "triton    not installed" in text
    assert "float16: unknown" in text
    assert "nvcc             not found" in text


def test_a_long_last_column_goes_on_below_itself():
    path = "/a/path-that/is-longer/than-the-column-and/stays-whole"
    rows = [("what", "cpu", "some words and more words than fit"), ("more", "cuda", path)]
    assert list(aligned(rows, 44)) == [
        "  what  cpu   some words and more words than",
        "              fit",
        f"  more  cuda  {path}",
    ]
    assert len(list(aligned(rows))) == 2


# --- the machine ---------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="the stand-ins are shell scripts")
class TestTools:
    def test_versions_are_read(self, tools):
        tools("nvcc", 'echo "Cuda compilation tools, release 12.4, V12.4.131"')
        tools(
            "nvidia-smi",
            "if [ $# -gt 0 ]; then echo 550.54.15; echo 550.54.15; "
            'else echo "| NVIDIA-SMI 550.54  Driver Version: 550.54.15  CUDA Version: 12.5 |"; fi',
        )
        found = machine.cuda()
        assert (found["nvcc"], found["driver"], found["driver_cuda"]) == (
            "12.4",
            "550.54.15",
            "12.5",
        )

    @pytest.mark.parametrize(
        "script", ["exit 9", "echo No devices were found", "printf '\\377'", "kill -9 $$"]
    )
    def test_a_broken_tool_is_a_missing_answer(self, tools, script):
        tools("nvcc", script)
        tools("nvidia-smi", script)
        found = machine.cuda()
        assert (found["nvcc"], found["driver"], found["driver_cuda"]) == (None, None, None)
        assert found["nvcc_path"] is not None

    def test_a_tool_that_hangs_is_given_up(self, tools, monkeypatch):
        monkeypatch.setattr(machine, "TOOL_TIMEOUT_S", 0.2)
        tools("nvcc", "exec /bin/sleep 60")
        assert machine.cuda()["nvcc"] is None


def test_cudnn_version():
    numbers = {92000: "9.20.0", 91002: "9.10.2", 90100: "9.1.0", 8902: "8.9.2"}
    assert {number: machine._cudnn_version(number) for number in numbers} == numbers


@pytest.mark.parametrize(
    ("capability", "float16", "bfloat16"),
    [
        ((5, 2), False, False),
        ((6, 0), True, False),
        ((7, 5), True, False),
        ((8, 0), True, True),
        ((12, 0), True, True),
    ],
)
def test_half_types_of_a_gpu(capability, float16, bfloat16):
    half = {half.dtype: half.native for half in machine._cuda_half_types(capability)}
    assert half == {"float16": float16, "bfloat16": bfloat16}


@pytest.mark.parametrize(
    ("flags", "float16", "bfloat16"),
    [
        ({"avx2"}, False, False),
        ({"avx512_bf16"}, False, True),
        ({"amx_bf16", "avx512_fp16"}, True, True),
        ({"fp16_arith", "bf16"}, True, True),
        (set(), None, None),
    ],
)
def test_half_types_of_a_cpu(monkeypatch, flags, float16, bfloat16):
    found = dict.fromkeys(flags, True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    half = {half.dtype: half.native for half in machine.devices()[0].half_types}
    assert half == {"float16": float16, "bfloat16": bfloat16}


def _fake_gpus(monkeypatch, properties):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_a_gpu_is_described(monkeypatch):
    facts = types.SimpleNamespace(
        name="NVIDIA T4", major=7, minor=5, total_memory=16 * 2**30, multi_processor_count=40
    )
    _fake_gpus(monkeypatch, lambda index: facts)
    gpu = machine.devices()[1]
    assert (gpu.device, gpu.name, gpu.capability) == ("cuda:0", "NVIDIA T4", "7.5")
    line = " ".join(" ".join(row) for row in info._device(gpu))
    assert "40 multiprocessors, 16.0 GiB, compute capability 7.5" in line
    assert "bfloat16: not native" in line


def test_a_gpu_that_fails_is_a_line_of_the_report(monkeypatch):
    def fail(index):
        raise RuntimeError("CUDA error: device unavailable\nmore")

    _fake_gpus(monkeypatch, fail)
    assert machine.devices()[1].name == "unusable: CUDA error: device unavailable"


# --- the speeds of dtypes ------------------------------------------------------------------


@pytest.fixture
def noted(monkeypatch):
    """Replace the operations by one that notes how it is called, float16 in torch being slow."""
    calls = []

    def prepare(dtype, device):
        if dtype == torch.bfloat16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return lambda: calls.append((dtype, cpu_float16.is_on(), torch.is_grad_enabled()))

    def clock(device):
        def time_once(call):
            call()
            dtype, under_amp, _ = calls[-1]
            slow = (dtype, under_amp) == (torch.float16, False)
            return CallTime(1000.0 if slow else 2.0, 0.0, 0.0)

        return time_once

    monkeypatch.setattr(speeds, "OPERATIONS", {"product": prepare})
    monkeypatch.setattr(speeds, "clock", clock)
    return calls


def test_each_dtype_is_timed_and_a_slow_one_once(noted):
    found = speeds.speeds(torch.device("cpu"))
    assert [(one.dtype, one.under, one.ms) for one in found] == [
        ("float32", "torch", 2.0),
        ("float16", "torch", 1000.0),
        ("float16", "amp", 2.0),
        ("bfloat16", "torch", None),
    ]
    assert collections.Counter(noted) == {
        (torch.float32, False, True): 6,
        (torch.float16, False, True): 1,
        (torch.float16, True, True): 6,
    }
    assert speeds.times_of_float32(found)["float16", "torch"] == {"product": 500.0}
    drawn = info.draw(dataclasses.replace(info.collect(), speeds={"cpu": found}))
    rows = [line.split() for line in drawn.splitlines()]
    for row in ("float16 500", "float16, amp 1", "bfloat16 cannot", "float32 in ms 2"):
        assert ["cpu", *row.split()] in rows


@pytest.mark.parametrize("on", [True, False])
def test_timing_dtypes_leaves_the_process_as_it_was(on, noted, monkeypatch):
    before = cpu_float16.is_on(), torch.random.get_rng_state()
    if on:
        cpu_float16.begin(torch.float16, ["cpu"])
    else:
        cpu_float16.switch(on=False)
    try:
        with torch.no_grad(), torch.autocast("cpu"):
            speeds.speeds(torch.device("cpu"))
            assert (cpu_float16.is_on(), torch.is_grad_enabled()) == (on, False)
            assert torch.is_autocast_enabled("cpu")
            monkeypatch.setattr(speeds, "_best_times", lambda plan, device: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                speeds.speeds(torch.device("cpu"))
        assert cpu_float16.is_on() == on
        assert torch.equal(torch.random.get_rng_state(), before[1])
    finally:
        cpu_float16.switch(on=before[0])


def test_what_is_timed_is_of_the_dtype(monkeypatch):
    """A product, a convolution, and the gradients of its input and its weight."""
    results = [prepare(torch.float16, CPU)() for prepare in OPERATIONS.values()]
    product, forward, backward = results
    assert {x.dtype for x in (product, forward, *backward)} == {torch.float16}
    shapes = [tuple(x.shape) for x in (product, forward, *backward)]
    assert shapes == [(8, 8), (1, 64, 32, 32), (1, 32, 32, 32), (64, 32, 3, 3)]
    assert speeds.speeds(torch.device("meta")) == ()


# --- the code paths ------------------------------------------------------------------------


def test_every_family_is_live_on_the_cpu():
    live = {line.family: line for line in info.live_paths(["cpu"])}
    first = ["casting", "float16 arithmetic", "gradient unscaling", "optimizers"]
    assert list(live) == [*first, "lists of tensors", "norms, losses, attention"]
    assert {line.path for line in live.values()} == {"torch fused"}
    assert all(line.why for line in live.values())


def test_float16_on_the_cpu(monkeypatch):
    for native in (True, False):
        monkeypatch.setattr(cpu_float16, "has_float16_instructions", lambda native=native: native)
        line = info.live_paths(["cpu"])[1]
        assert ("matrix products" in line.why) is not native
        assert all(words in line.why for words in ("attention", "float32, rounded once"))


def test_unscaling_says_why_it_cannot_run(monkeypatch):
    def fail(*args):
        raise NotImplementedError("not built for this device\nlong list")

    monkeypatch.setattr(private, "amp_foreach_non_finite_check_and_unscale_", fail)
    line = info.live_paths(["cpu"])[2]
    assert line.path == "unavailable"
    assert line.why.endswith("cannot run: not built for this device")


# --- what else is called apex --------------------------------------------------------------

OURS = str(pathlib.Path(apex.__file__).resolve().parent.parent)


def _package(folder, *files):
    for name in ("__init__.py", *files):
        path = folder / "apex" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return str(folder)


def _metadata(folder, version, *fields, entry=None):
    where = folder / f"apex-{version}.dist-info"
    where.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", "Name: apex", f"Version: {version}", *fields]
    (where / "METADATA").write_text("\n".join(lines) + "\n")
    if entry:
        (where / "entry_points.txt").write_text(f"[console_scripts]\napex = {entry}\n")
    return str(folder)


def test_alone_and_well_installed(tmp_path):
    site = _metadata(tmp_path, apex.__version__, entry=COMMAND)
    found = installs.search([OURS, site])
    assert not found.shadowed
    assert [item.project for item in found.distributions] == [installs.OURS]
    assert found.advice == ()


def test_a_clone_of_nvidia_s_apex_in_the_current_folder_shadows(tmp_path, monkeypatch):
    _package(tmp_path, "multi_tensor_apply/__init__.py")
    monkeypatch.chdir(tmp_path)
    found = installs.search()
    assert found.shadowed
    assert found.packages[0].project == installs.NVIDIA
    assert found.advice[0].startswith(f"{tmp_path / 'apex'} (NVIDIA's Apex) is imported instead of")


def test_what_does_not_shadow_and_a_single_file_that_does(tmp_path):
    found = installs.search([OURS, _package(tmp_path / "behind", "models.py", "views.py")])
    assert not found.shadowed
    assert found.packages[1].project == installs.PYRAMID
    assert "is installed, too; Python imports this one" in found.advice[0]

    (tmp_path / "empty" / "apex").mkdir(parents=True)  # a folder without __init__
    found = installs.search([str(tmp_path / "empty"), OURS])
    assert not found.shadowed
    assert len(found.packages) == 1

    (tmp_path / "apex.py").write_text("")
    found = installs.search([str(tmp_path), OURS])
    assert found.shadowed
    assert found.packages[0].where == str(tmp_path / "apex.py")


@pytest.mark.parametrize(
    ("fields", "project"),
    [
        (["Summary: Pyramid toolkit to add authentication"], installs.PYRAMID),
        (["Summary: web", "Requires-Dist: pyramid"], installs.PYRAMID),
        (["Summary: PyTorch Extensions written by NVIDIA"], installs.NVIDIA),
        (["Summary: something"], installs.UNKNOWN),
        ([], installs.UNKNOWN),
    ],
)
def test_foreign_metadata_is_named_with_the_remedy(tmp_path, fields, project):
    found = installs.search([OURS, _metadata(tmp_path, "0.9.10.dev0", *fields)])
    assert [item.project for item in found.distributions] == [project]
    assert "pip uninstall apex" in found.advice[0]
    assert project in found.advice[0]


def test_two_projects_installed_into_one_folder(tmp_path):
    _metadata(tmp_path, "0.1", "Summary: PyTorch Extensions written by NVIDIA")
    _metadata(tmp_path, apex.__version__, entry=COMMAND)
    found = installs.search([OURS, str(tmp_path), str(tmp_path)])
    assert {item.project for item in found.distributions} == {installs.NVIDIA, installs.OURS}
    assert len(found.advice) == 1


def test_no_metadata_and_stale_metadata(tmp_path):
    assert "do not find it" in installs.search([OURS]).advice[0]
    site = _metadata(tmp_path, "0.0.1", entry=COMMAND)
    assert "the metadata says 0.0.1" in installs.search([OURS, site]).advice[0]


def test_half_removed_metadata_does_not_stop_the_report(tmp_path):
    (tmp_path / "apex-0.1.dist-info").mkdir()
    found = installs.search([OURS, str(tmp_path)])
    assert [item.project for item in found.distributions] == [installs.UNKNOWN]


@pytest.mark.slow
def test_the_findings_are_drawn(tmp_path):
    clone = _package(tmp_path / "clone", "multi_tensor_apply/__init__.py")
    site = _metadata(tmp_path / "site", "0.1", "Summary: PyTorch Extensions written by NVIDIA")
    report = dataclasses.replace(
        info.collect(), installs=installs.search([clone, OURS, site]), cuda=MISSING
    )
    text = info.draw(report)
    assert "shadowed    yes" in text
    assert f"importable  {tmp_path / 'clone' / 'apex'}, NVIDIA's Apex" in text
    assert "installed   0.1, NVIDIA's Apex" in text
    assert "to do " in text
    assert "available        no: a CPU build" in text


def test_info_says_whether_kernels_can_run(monkeypatch):
    monkeypatch.setattr(info, "speeds", lambda device: ())
    for why_not, said in (("no gcc", "cannot run: no gcc (plain PyTorch"), (None, "run\n")):
        monkeypatch.setattr(_runtime, "why_not_triton", lambda kind="cuda", why=why_not: why)
        report = info.collect()
        assert report.why_not_triton == why_not
        assert f"Triton kernels   {said}" in info.draw(report)
