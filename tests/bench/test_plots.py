"""Every plot is drawn whatever the results are, and shows what it should."""

import math
import sys
import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from apex.bench.output import looks
from apex.bench.training import curves, panels, plots
from apex.bench.training.precision import LEVELS
from apex.bench.training.remarks import marks
from tests.bench import made

ALL = {"overview", "speed", "time", "memory", "accuracy", "loss", "loss-difference", "scale"}
NONE = dict.fromkeys(("step_ms", "data_ms", "losses", "accuracy", "epoch_seconds", "scales"), ())


def _one(**changes):
    cell = made.cell()
    return made.report([cell], [made.run(cell, **changes)])


WORLDS = {
    "several batch sizes, with trouble": (lambda: made.troubled((128, 512)), ALL),
    "one batch size": (made.report, ALL),
    "GPU, tasks, TF32": (made.on_gpu, ALL),
    "one level": (_one, ALL - {"speed", "scale", "loss-difference"}),
    "no accuracy, no memory": (
        lambda: _one(accuracy=(), peak_tensor_bytes=None),
        {"overview", "time", "loss"},
    ),
    "not finite": (
        lambda: _one(status="diverged", losses=(1.0, math.inf, -math.inf) + (math.nan,) * 57),
        ALL - {"speed", "scale", "loss-difference"},
    ),
    "only failures": (lambda: _one(status="failed", error="no", peak_tensor_bytes=None, **NONE),
                      set()),
}  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_every_plot_with_numbers_is_drawn_and_not_blank(world, tmp_path):
    make, expected = WORLDS[world]
    of = make()
    for name in ALL:  # of an earlier run
        (tmp_path / f"{name}.png").write_text("old")
    svgs = plots.draw(of, made.verdicts(of), tmp_path)
    assert set(svgs) == expected
    assert {f.name for f in tmp_path.iterdir()} == {
        f"{n}.{s}" for n in svgs for s in ("png", "svg")
    }
    for name in svgs:
        image = imread(tmp_path / f"{name}.png")[..., :3]
        assert min(image.shape[:2]) >= 500
        assert (image < 0.95).any(-1).mean() > 0.01  # of the pixels have something on them
        ET.parse(tmp_path / f"{name}.svg")  # sound XML
        assert "Thinking Machine" in svgs[name] or "Graphics Engine" in svgs[name]


def _axes():
    return Figure().add_subplot()


def _sources(of):
    return [panels.Source.of("", of, made.verdicts(of))]


def test_lines_go_through_the_medians_with_p10_and_p90():
    of = made.troubled()
    axes = _axes()
    panels.draw_view(axes, _sources(of), panels.VIEWS["time"], "digits-cnn")
    drawn = {box.get_label(): box for box in axes.containers}
    mine = [line.row for line in _sources(of)[0].lines if line.row.label == "O4"]
    line, _, [bars] = drawn["O4"].lines
    assert list(line.get_ydata()) == [row.ms_median for row in mine]
    ends = [end[1] for segment in bars.get_segments() for end in segment]
    assert ends == pytest.approx([end for row in mine for end in (row.ms_p10, row.ms_p90)])
    assert list(drawn) == list(made.LEVELS)  # one that failed everywhere is in the legend
    for said in ("O0 out of memory (1 of 3) at 512", "FP16 failed (3 of 3) at 128, 256, 512"):
        assert said in axes.get_xlabel().replace("\n", " ")


def test_speed_bars_start_at_one_and_have_the_intervals_of_the_verdicts():
    of = made.report()
    axes = _axes()
    [source] = _sources(of)
    panels.draw_speed(axes, [("", source.lines)])
    speeds = [line.row.speed for line in source.lines if line.row.label != "O0"]
    bars = [patch for patch in axes.patches if patch.get_y() == 1]
    assert [1 + bar.get_height() for bar in bars] == pytest.approx(speeds)
    whiskers = [b.lines[2][0].get_segments()[0] for b in axes.containers if hasattr(b, "lines")]
    assert [whisker[:, 1].tolist() for whisker in whiskers] == [
        pytest.approx([0.96 * speed, 1.04 * speed]) for speed in speeds
    ]


def test_speed_without_an_interval_has_no_whisker():
    of = made.report([made.cell(level) for level in ("O0", "O4")])
    axes = _axes()
    panels.draw_speed(axes, [("", _sources(of)[0].lines)])
    assert not [box for box in axes.containers if hasattr(box, "lines")]


def test_the_trace_shows_each_change_of_each_scale_that_moves():
    of = made.report()
    axes = _axes()
    curves.draw_scale(axes, of, [line.row for line in _sources(of)[0].lines])
    names = [line.get_label() for line in axes.lines]
    assert names == ["O1, seed 0", "O2, seed 0", "native-fp16, seed 0"]
    scales = next(run for run in of.runs if run.cell.level == "O1").scales
    steps = dict(zip(*axes.lines[0].get_data(), strict=True))
    value = None
    for step, scale in enumerate(scales, 1):
        value = steps.get(step, value)
        assert value == scale


def test_the_loss_is_the_mean_of_the_seeds():
    of = made.report([made.cell(seed=seed) for seed in range(3)])
    axes = _axes()
    curves.draw_loss(axes, of, [line.row for line in _sources(of)[0].lines])
    [line] = axes.lines
    first = [sum(run.losses[:2]) / 2 for run in of.runs]  # 40 points of 60 steps
    assert line.get_ydata()[0] == pytest.approx(sum(first) / 3)
    assert len(axes.collections) == 1  # the band


def test_the_difference_of_losses_is_taken_seed_by_seed():
    of = made.report([made.cell(level, seed=seed) for level in ("O0", "O4") for seed in range(3)])
    axes = _axes()
    curves.draw_difference(axes, of, [line.row for line in _sources(of)[0].lines])
    by_cell = {(run.cell.level, run.cell.seed): run.losses for run in of.runs}
    first = [sum(by_cell["O4", s][:2]) / 2 - sum(by_cell["O0", s][:2]) / 2 for s in range(3)]
    line, zero = axes.lines  # O0 itself is not drawn
    assert line.get_label() == "O4"
    assert line.get_ydata()[0] == pytest.approx(sum(first) / 3)
    assert set(zero.get_ydata()) == {0}


def test_incomplete_and_quick_reports_are_marked(tmp_path):
    cells = [made.cell(level, quick=True) for level in ("O0", "O4")]
    of = made.report(cells, [made.run(cells[0])])
    for svg in plots.draw(of, [], tmp_path).values():
        assert "INCOMPLETE: 1 of 2 runs" in svg
        assert "QUICK" in svg


@pytest.mark.parametrize("legend", [True, False])
def test_the_marks_fit_above_a_narrow_plot(legend):
    of = Figure(figsize=plots.PANEL, layout="constrained")
    axes = of.add_subplot()
    axes.plot([1, 2], label="O0" if legend else "")
    cells = [made.cell("O0", quick=True)]
    said = " · ".join([*marks(made.report(cells, [])), "BUSY MACHINE: times vary a lot"])
    plots._finish(of, said, "here")
    of.draw_without_rendering()
    text = of.legends[0].get_title() if legend else of._suptitle
    assert text.get_text().replace("\n", " ") == said
    box = text.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= of.bbox.x1
    assert box.y1 <= of.bbox.y1


def test_names_of_tasks_cannot_break_a_plot(tmp_path):
    of = made.report(
        [made.cell(level, task="$x_{$</text><script>\x01 名") for level in ("O0", "O4")]
    )
    for name, svg in plots.draw(of, made.verdicts(of), tmp_path).items():
        assert "<script" not in svg
        ET.parse(tmp_path / f"{name}.svg")


def test_every_level_has_a_look_of_its_own():
    found = [looks.look(level) for level in LEVELS]
    found.append(looks.look("O0 TF32 on", {"O0 TF32 on", "O0 TF32 off"}))
    assert len({look.colour for look in found}) == len(found)
    assert len({look.marker for look in found}) == len(LEVELS)
    assert looks.look("O4 TF32 on", {"O4 TF32 on"}) == looks.look("O4")


def test_plots_leave_pyplot_alone(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    plots.draw(_one(), [], tmp_path)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
