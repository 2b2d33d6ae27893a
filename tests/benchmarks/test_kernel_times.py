"""The times are made by the machine: what is tested is everything around them."""

import itertools
import json
import math

import pytest
import torch

from apex.catalogue import entry as sizes
from apex.commands.info import clocks
from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels import command as command
from benchmarks.kernels import timing
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.cases import OF_LAYERS, OF_LISTS, Provider, TimedCase
from benchmarks.kernels.command import OPS

CPU = torch.device("cpu")
SMALL = [(3,), (2, 5), (1,)]
SETS = (  # of shapes, and what they are replaced by
    (sizes.LISTS, SMALL),
    (sizes.MATRICES, [(2, 7)]),
    (sizes.IMAGES, [(1, 2, 1, 7)]),
    (sizes.SCORES, [(1, 2, 3, 7)]),
    (sizes.CAUSAL, [(2, 7, 7)]),
    (sizes.ROTARY, [(3, 1, 2, 8)]),
    (sizes.ATTENTION, [(3, 2, 8)]),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP", 1)
    monkeypatch.setitem(kernel_cases.COMPILE, "backend", "eager")  # no C++ compiler's minutes
    for sets, small in SETS:
        for name in sets:
            monkeypatch.setitem(sets, name, lambda full, small=small: small)


@pytest.fixture
def calls(monkeypatch):
    """Replace the operations by one with two providers, which note their calls."""
    noted = []

    def noting(name):
        return Provider(name, lambda tensors: lambda: noted.append((name, len(tensors))), _bytes)

    op = TimedCase("noting", _made, (noting("apex"), noting("peer")), sizes.LISTS)
    monkeypatch.setattr(command, "OPS", (op,))
    return noted


def _made(shapes, dtype, device):
    return [torch.ones(shape, dtype=dtype) for shape in shapes]


def _bytes(dtype):
    return 2 * dtype.itemsize


def _bench(file, *options):
    fixed = ("--device", "cpu", "--repeats", "2", "--threads", "1", "--json", str(file))
    return main([*fixed, *options])


def _provider(name, call):
    return Provider(name, lambda tensors: call, _bytes)


def _read(file):
    return json.loads(file.read_text(encoding="utf-8"))


# --- cases ----------------------------------------------------------------------------------------


def test_the_names_are_different_and_ours_is_first():
    assert len({op.name for op in OPS}) == len(OPS)
    for op in OPS:
        names = [provider.name for provider in op.providers]
        assert names[0] == "apex"
        assert len({*names}) == len(names) > 1


# Layers have an operation for each mode. "both" runs what the other two run.
BOTH = [op for op in OF_LAYERS if op.name.endswith("_both")]
RESULTS = [op for op in OF_LAYERS if not op.name.endswith("_backward")]


# By default one of each kind: torch.compile takes seconds for each.
KINDS = {"adam", "scale", "l2norm", "rms_norm_both", "linear_cross_entropy_both", "rotary_both"}


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=op.name, marks=[] if op.name in KINDS else pytest.mark.exhaustive)
        for op in (*OF_LISTS, *BOTH)
    ],
)
def test_every_provider_that_is_installed_can_be_timed(op):
    shapes = next(iter(op.shapes.values()))(False)
    rows, missing = timing.measure(op, "small", shapes, "float32", CPU, 2)
    assert not missing
    assert [row.provider for row in rows] == [one.name for one in op.providers if not one.only_on]
    size = (len(shapes), sum(map(math.prod, shapes)), 2)
    for row in rows:
        assert row.problem is None
        assert (row.op, row.tensors, row.elements, len(row.times)) == (op.name, *size)
        assert 0 < row.p20_ms <= row.p50_ms <= row.p80_ms
        assert (row.ratio is None) == row.ours
        assert row.bounds is None  # of two turns
        assert (row.gb_s is None) == (op.providers[0].bytes_per_element is None)
        assert (row.peak_mib is not None) == op.name.endswith("_both")
        assert (row.launches, row.host_ms) == (None, None)  # not on a CPU


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [  # counted by hand
        ("adam", "float32", [28, 28, 28]),
        ("adam", "bfloat16", [22, 14, 14]),  # ours has moments in float32
        ("sgd", "float32", [20, 20, 20]),
        ("lamb", "float32", [44, 44]),
        ("novograd", "float32", [24, 24]),
        ("scale", "float16", [4, 4, 4]),
        ("axpby", "float32", [12, 12]),
        ("l2norm", "float32", [4, 4]),
        ("layer_norm_forward", "float32", [8, 8, 8, 8]),
        ("layer_norm_backward", "bfloat16", [6, 6, 6, 6]),
        ("rms_norm_both", "float32", [20, 20, 20, 20, 20]),
        ("cross_entropy_both", "float16", [6, 6, 6, 6]),
        ("group_norm_both", "float16", [10, 10, 10, 10]),
    ],
)
def test_the_bytes_that_have_to_be_moved(name, dtype, expected):
    [op] = [op for op in OPS if op.name == name]
    moved = [p.bytes_per_element(kernel_cases.DTYPES[dtype]) for p in op.providers]
    assert moved == expected


STEPS = [op for op in OPS if op.make is kernel_cases._parameters]


@pytest.mark.parametrize("op", STEPS, ids=lambda op: op.name)
def test_providers_of_an_optimizer_compute_the_same(op):
    after = []
    for provider in op.providers:
        torch.manual_seed(0)
        params = op.make(SMALL, torch.float32, CPU)
        grads = [param.grad.clone() for param in params]  # LAMB writes over its gradients
        step = provider.prepare(params)
        for number in range(3):
            for param, grad in zip(params, grads, strict=True):
                param.grad.copy_(grad * 0.5**number)  # of equal ones an average shows no decay
            step()
        after.append(params)
    for theirs in after[1:]:
        for our, their in zip(after[0], theirs, strict=True):
            torch.testing.assert_close(our, their)


@pytest.mark.parametrize("op", RESULTS, ids=lambda op: op.name)
@pytest.mark.slow
def test_providers_of_a_layer_compute_the_same(op):
    torch.manual_seed(0)
    inputs = op.make(next(iter(op.shapes.values()))(False), torch.float32, CPU)
    ours, *others = [p.prepare(inputs)() for p in op.providers if p.only_on is None]
    for theirs in others:
        torch.testing.assert_close(ours, theirs)


def test_the_sets_have_the_shapes_that_the_help_promises(monkeypatch):
    monkeypatch.undo()
    assert len(sizes.LISTS["one"](True)) == 1
    assert sizes.LISTS["one"](True) == [(10 * sizes.LISTS["one"](False)[0][0],)]
    assert len(sizes.LISTS["transformer"](False)) == 293
    assert 1e7 < sum(map(math.prod, sizes.LISTS["transformer"](False))) < 1.1e7
    assert len(sizes.LISTS["tiny"](False)) == 1000
    assert sizes.MATRICES["wide"](True) == [(2048, 32768)]
    others = (sizes.IMAGES, sizes.SCORES, sizes.CAUSAL, sizes.ROTARY)
    for name, matrices in sizes.MATRICES.items():
        for full, sets in itertools.product((False, True), others):
            [rows], [shape] = matrices(full), sets[name](full)
            assert math.prod(rows) == math.prod(shape)


# --- measuring ------------------------------------------------------------------------------------


def test_providers_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    taken = clocks.take_turns(calls, 30, shuffled=True)
    turns = ["".join(order[start : start + 3]) for start in range(0, 90, 3)]
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len({*turns}) == 6  # nobody always follows the same one
    assert {name: len(mine) for name, mine in taken.items()} == dict.fromkeys("abc", 30)


def test_all_providers_get_the_same_tensors(calls):
    seen = []
    [op] = command.OPS
    providers = tuple(
        Provider(name, lambda tensors: (seen.append(tensors), lambda: None)[1], _bytes)
        for name in ("apex", "peer")
    )
    timing.measure(
        TimedCase("same", op.make, providers, sizes.LISTS), "small", SMALL, "float32", CPU, 1
    )
    first, second = seen
    assert first is second
    assert [tuple(x.shape) for x in first] == SMALL


def test_what_one_provider_cannot_do_is_a_row_and_what_is_not_installed_is_named(calls):
    def refuse():
        raise RuntimeError("not\n on a   Tuesday")

    def absent(tensors):
        raise ModuleNotFoundError("No module named 'rival'", name="rival")

    [op] = command.OPS
    peers = (_provider("refuses", refuse), Provider("absent", absent, _bytes))
    op = TimedCase("mixed", op.make, (op.providers[0], *peers), sizes.LISTS)
    rows, missing = timing.measure(op, "small", SMALL, "float32", CPU, 1)
    assert [(row.provider, row.problem) for row in rows] == [
        ("apex", None),
        ("refuses", "RuntimeError: not on a Tuesday"),
    ]
    assert missing == {"absent": "rival"}


# --- the command ----------------------------------------------------------------------------------


def test_the_command_times_shows_and_keeps_everything(tmp_path, calls, capsys):
    file = tmp_path / "new" / "rows.json"
    assert _bench(file, "--shapes", "tiny", "one", "--dtype", "float32", "bfloat16") == 0
    report = _read(file)
    assert {path.suffix for path in file.parent.iterdir()} == {".json", ".csv"}
    assert report["complete"]
    assert [(r["shapes"], r["dtype"], r["provider"]) for r in report["rows"]] == [
        (shapes, dtype, provider)
        for shapes in ("one", "tiny")
        for dtype in ("float32", "bfloat16")
        for provider in ("apex", "peer")
    ]
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["environment"]["threads"] == 1
    assert {"name", "capability"} <= report["environment"]["device"].keys()
    assert report["rows"][0]["bytes_per_element"] == 8
    shown, told = capsys.readouterr()
    assert "tiny: 3 tensors, 14 elements, bfloat16" in shown
    assert shown.count("noting") == 8
    assert told.splitlines()[0] == "1/4  noting, one, float32"


def test_one_operation_of_those_there_are(tmp_path):
    assert _bench(tmp_path / "rows.json", "--op", "adam", "--shapes", "tiny") == 0
    rows = _read(tmp_path / "rows.json")["rows"]
    assert [row["provider"] for row in rows] == ["apex", "torch fused", "torch foreach"]


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "a peer's"])
def test_only_our_own_failure_is_the_command_s(ours, tmp_path, calls, monkeypatch, capsys):
    def refuse():
        raise RuntimeError("broken")

    providers = [_provider("apex", lambda: None), _provider("peer", lambda: None)]
    providers[0 if ours else 1] = _provider("apex" if ours else "peer", refuse)
    op = TimedCase("broken", _made, tuple(providers), sizes.LISTS)
    monkeypatch.setattr(command, "OPS", (op,))
    assert _bench(tmp_path / "rows.json", "--shapes", "one") == (1 if ours else 0)
    assert "RuntimeError: broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("at", "kept"), [("tiny", ["one", "one"]), ("one", None)], ids=["later", "in the first case"]
)
def test_an_interruption_keeps_and_shows_what_is_finished(
    at, kept, tmp_path, calls, monkeypatch, capsys
):
    measure = command.measure

    def interrupted(op, name, *others):
        if name == at:
            raise KeyboardInterrupt
        return measure(op, name, *others)

    monkeypatch.setattr(command, "measure", interrupted)
    file = tmp_path / "rows.json"
    file.write_text("former")
    assert _bench(file, "--shapes", "one", "tiny") == 130
    shown = capsys.readouterr().out
    if kept is None:
        assert file.read_text() == "former"
        assert "nothing to show" in shown
    else:
        report = _read(file)
        assert not report["complete"]
        assert [row["shapes"] for row in report["rows"]] == kept
        assert "INCOMPLETE" in shown


def test_the_file_says_how_memory_and_threads_were_set(tmp_path, calls, monkeypatch, capsys):
    before = torch.get_num_threads()
    threads = before + 1
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    for number, pages in enumerate((False, True)):
        if pages:
            monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
        words = ("--shapes", "one", "--threads", str(threads))
        assert _bench(tmp_path / f"{number}.json", *words) == 0
        assert torch.get_num_threads() == before
        here = _read(tmp_path / f"{number}.json")["environment"]
        assert (here["threads"], here["huge_pages"]) == (threads, pages)
        assert ("THP_MEM_ALLOC_ENABLE=1" in capsys.readouterr().out) == pages


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--op", "nonsense"], "nonsense"),
        (["--shapes", "nonsense"], "nonsense"),
        (["--dtype", "int8"], "int8"),
        (["--repeats", "0"], "'0' is not a whole number of 1 or more"),
        (["--threads", "none"], "'none' is not a whole number of 1 or more"),
        (["--device", "toaster"], "unknown; use cpu, cuda or cuda:N"),
        (["--op", "adam", "--shapes", "small"], "no shapes of --op (adam has one,"),
        (["--json", "FOLDER"], "is a folder"),
        (["--json", "FOLDER/rows.csv"], "the CSV file gets this name"),
        (["--json", "FOLDER/file/rows.json"], "is a file; name a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_one_line_before_anything_is_timed(
    options, complaint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "measure", pytest.fail)
    (tmp_path / "file").write_text("precious")
    options = [option.replace("FOLDER", str(tmp_path)) for option in options]
    try:
        code = _bench(tmp_path / "rows.json", *options)
    except SystemExit as exit_:
        code = exit_.code
    shown, told = capsys.readouterr()
    assert code == 2
    assert shown == ""
    assert len(told.splitlines()) == 1
    assert told.startswith("python -m benchmarks.kernels: ")
    assert complaint in told
    assert not (tmp_path / "rows.json").exists()


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in ("--op", "--shapes", "--dtype", "--repeats", "--full", "--threads", "--json"):
        assert option in shown
    for op in OPS:
        assert op.name in shown


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    options = ["--device", "cuda", "--repeats", "2", "--json", str(tmp_path / "rows.json")]
    assert main(options) == 0
    for row in _read(tmp_path / "rows.json")["rows"]:
        if row["problem"] is None:
            assert row["launches"] > 0
