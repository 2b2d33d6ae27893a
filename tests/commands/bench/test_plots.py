"""Every plot is drawn whatever the results are, and shows what it should."""

import math
import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from apex.commands.bench.output import figures
from apex.commands.bench.training import plots
from apex.commands.bench.training.precision import LEVELS
from apex.commands.bench.training.rows import rows
from apex.commands.bench.training.table import lines
from apex.commands.bench.training.verdict import verdicts
from tests.commands.bench import made

ALL = {"overview", "time", "memory", "accuracy", "loss", "scale"}


def _one(**changes):
    cell = made.cell()
    return made.report([cell], [made.run(cell, **changes)])


WORLDS = {
    "one batch size": (made.report, ALL),
    "GPU, tasks, TF32": (lambda: made.on_gpu(batches=(128,)), ALL),
    "GPU, tasks, TF32, several batch sizes": (made.on_gpu, ALL),
    "one level": (_one, {"time", "memory", "accuracy", "loss"}),
    "no accuracy, no memory": (lambda: _one(accuracy=(), peak_bytes=None), {"time", "loss"}),
    "not finite": (
        lambda: _one(status="diverged", losses=(1.0, math.inf, -math.inf) + (math.nan,) * 57),
        {"time", "memory", "accuracy", "loss"},
    ),
    "only failures": (
        lambda: _one(status="failed", error="no", peak_bytes=None, **made.NOTHING), set()
    ),
}  # fmt: skip


OFTEN = ("GPU, tasks, TF32", "not finite", "only failures")


@pytest.mark.parametrize(
    "world",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.exhaustive) for name in WORLDS],
)
@pytest.mark.slow
def test_every_plot_with_numbers_is_drawn_and_not_blank(world, tmp_path):
    """With a GPU it takes 4 s: 21 drawings of up to 12 panels."""
    make, expected = WORLDS[world]
    of = make()
    for name in ALL:  # of an earlier run
        (tmp_path / f"{name}.png").write_text("old")
    drawn = plots.draw(of, verdicts(of), tmp_path)
    assert set(drawn) == expected
    _look(drawn, tmp_path)


@pytest.mark.slow
def test_several_batch_sizes_with_trouble(troubled):
    assert set(troubled.drawn) == ALL
    _look(troubled.drawn, troubled.folder)


def _look(drawn, folder):
    """Check that the files are those of the plots, and have something on them."""
    files = {f"{name}.{suffix}" for name in drawn for suffix in ("png", "svg")}
    assert {file.name for file in folder.iterdir()} == files
    for name, plot in drawn.items():
        image = imread(folder / f"{name}.png")[..., :3]
        assert min(image.shape[:2]) >= 400
        assert (image < 0.95).any(-1).mean() > 0.01  # of the pixels have something on them
        text = (folder / f"{name}.svg").read_text()
        ET.fromstring(text)  # sound XML
        assert "Thinking Machine" in text or "Graphics Engine" in text
        assert "Machine" not in plot.wide  # the page says it once


@pytest.mark.slow
def test_a_file_of_a_quick_run_says_so_and_names_of_tasks_cannot_break_it(tmp_path):
    """Nor is pyplot imported for it."""
    had_pyplot = "matplotlib.pyplot" in sys.modules
    task = "$x_{$</text><script>\x01 名"
    cells = [made.cell(level, task=task, quick=True) for level in ("O0", "O4", "O5")]
    of = made.report(cells, [made.run(cell) for cell in cells[:2]])
    drawn = plots.draw(of, verdicts(of), tmp_path)
    assert "overview" in drawn
    for name, plot in drawn.items():
        file = tmp_path / f"{name}.svg"
        assert "incomplete · quick · Thinking" in file.read_text()
        assert "quick" not in plot.wide
        assert "<script" not in file.read_text()
        ET.parse(file)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def _axes():
    return Figure().add_subplot()


def _lines(of):
    return lines(of, verdicts(of))


def _texts(axes):
    return [text.get_text() for text in axes.texts]


def test_speed_has_a_dot_for_each_seed_and_the_interval_of_the_verdict():
    axes, of = _axes(), _lines(made.report())
    plots._speeds(axes, of)
    dots = [line for line in axes.lines if line.get_marker() == "."]
    assert [len(line.get_xdata()) for line in dots] == [3] * 8
    whiskers = [box.lines[2][0].get_segments()[0][:, 0].tolist() for box in axes.containers]
    known = [line.verdict.speed for line in of if line.verdict]
    assert whiskers == [pytest.approx([each.low, each.high]) for each in known]
    assert _texts(axes)[1:] == [f"{line.ratio:.2f}×" for line in of[1:]]


def test_a_busy_machine_has_no_interval_and_fewer_than_three_seeds_too():
    cells = [made.cell(level, seed=s) for level in ("O0", "O4") for s in range(3)]
    busy = [made.run(of, noise=2.0) for of in cells]
    axes = _axes()
    plots._speeds(axes, _lines(made.report(cells, busy)))
    assert not axes.containers
    assert _texts(axes)[1] == "too noisy"
    axes = _axes()
    plots._speeds(axes, _lines(made.report(cells[::3])))
    assert not axes.containers


@pytest.mark.parametrize("accuracy", [True, False])
def test_the_dots_of_a_quality_are_the_differences_from_o0_at_the_same_seed(accuracy):
    cells = [made.cell(level, seed=seed) for seed in range(3) for level in ("O0", "O1", "O4")]
    runs = [made.run(cell, **({} if accuracy else {"accuracy": ()})) for cell in cells]
    axes, (base, *others) = _axes(), _lines(made.report(cells, runs))
    plots._qualities(axes, [base, *others])
    dots = [line.get_xdata() for line in axes.lines if line.get_marker() == "."]
    for drawn, line in zip(dots, others, strict=True):
        if accuracy:
            pairs = zip(line.row.accuracies, base.row.accuracies, strict=True)
            assert list(drawn) == [mine - theirs for mine, theirs in pairs]
        else:
            pairs = zip(line.row.test_losses, base.row.test_losses, strict=True)
            assert list(drawn) == pytest.approx([100 * (1 - mine / its) for mine, its in pairs])


def test_the_quality_of_a_level_that_trained_for_fewer_steps_is_not_drawn():
    runs = [made.run(made.cell(level, seed=s)) for level in ("O0", "O1") for s in range(3)]
    short = [
        made.without(run, status="stopped", accuracy=(60.0,), losses=run.losses[:30])
        for run in runs[3:]
    ]
    axes = _axes()
    plots._qualities(axes, _lines(made.of_runs(*runs[:3], *short)))
    assert _texts(axes)[1] == ""


def test_an_empty_panel_says_why():
    gone = {
        "peak_bytes": None,
        "status": "stopped",
        "error": "stopped after 1 step",
        "blocks": (0,),
    }
    gone |= {"step_ms": (1.0,), "losses": (1.0,), "accuracy": (), "test_loss": ()}
    of = made.of_runs(
        *made.level("O0", others={"peak_bytes": None}), *made.level("O4", others=gone), budget_s=9.0
    )
    figure = plots._overview(lines(of, verdicts(of)))
    said = [
        text.get_text().partition("\n")[2]
        for axes in figure.axes
        for text in axes.texts
        if text.get_text().startswith("nothing to show")
    ]
    assert said == [
        "stopped by the time budget",
        "the time budget was too short for it",
        "no level trained to its end together with O0",
    ]
    whole = plots._overview(lines(made.report(), verdicts(made.report())))
    assert not any("nothing to show" in t.get_text() for axes in whole.axes for t in axes.texts)


@pytest.mark.parametrize(("losses", "said"), [((1.0,), []), ((math.nan, math.inf), ["nothing"])])
def test_a_curve_of_one_step_is_a_mark_and_one_without_numbers_says_so(losses, said):
    axes = Figure().subplots()
    plots._draw_losses(axes, rows(_one(losses=losses)))
    assert [text.get_text().partition(" ")[0] for text in axes.texts] == said
    (line,) = axes.lines
    assert (line.get_marker() != "None") is (said == [])


def test_levels_of_the_same_arithmetic_are_named_and_one_line_of_losses():
    of = made.report()
    axes = _axes()
    plots._qualities(axes, _lines(of))
    assert [text for text in _texts(axes) if text.startswith("as ")] == ["as O1", "as O4"]
    axes = _axes()
    plots._draw_losses(axes, rows(of))
    drawn = [line.get_label() for line in axes.lines]
    assert drawn == ["O0", "O1, O2", "O3", "O4, native-bf16", "O5", "native-fp16", "FP16"]
    assert len(axes.collections) == 1  # one band, of the first: others would hide it


def test_the_loss_is_the_mean_of_the_seeds():
    of = made.report([made.cell(seed=seed) for seed in range(3)])
    axes = _axes()
    plots._draw_losses(axes, rows(of))
    [line] = axes.lines
    first = [sum(run.losses[:2]) / 2 for run in of.runs]  # 40 points of 60 steps
    assert line.get_ydata()[0] == pytest.approx(sum(first) / 3)
    assert len(axes.collections) == 1  # the band


def test_the_trace_shows_each_change_of_each_scale_that_moves():
    of = made.report([made.cell("O1")])
    axes = _axes()
    plots._draw_scales(axes, rows(of))
    steps, value = dict(zip(*axes.lines[0].get_data(), strict=True)), None
    for step, scale in enumerate(of.runs[0].scales, 1):
        value = steps.get(step, value)
        assert value == scale


TICKS = {(0.9, 1.1): ["0.9", "1", "1.1"], (0.8, 3.2): ["1", "2", "3"],
         (0.03, 1.1): ["0.05", "0.1", "0.2", "0.5", "1"], (3, 4000): ["10", "100", "1,000"],
         (0.99, 1.01): ["1"]}  # fmt: skip


@pytest.mark.parametrize("ends", TICKS)
def test_ticks_are_numbers_that_a_person_reads(ends):
    axes = _axes()
    figures.log_axis(axes, shown=ends)
    axes.figure.draw_without_rendering()
    found = [label.get_text() for label in axes.get_yticklabels()]
    assert set(TICKS[ends]) <= set(found)
    assert len(found) <= 7


def test_every_level_has_a_style_of_its_own():
    found = [figures.style(level) for level in LEVELS]
    found.append(figures.style("O0 TF32 on", {"O0 TF32 on", "O0 TF32 off"}))
    assert len({style.colour for style in found}) == len(found)
    assert len({style.marker for style in found}) == len(LEVELS)
    assert figures.style("O4 TF32 on", {"O4 TF32 on"}) == figures.style("O4")
