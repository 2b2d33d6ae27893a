"""The HTML report: what is in it, that nothing can be smuggled in, and how a browser takes it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import markupsafe
import numpy as np
import pytest
from PIL import Image

from apex.commands.bench.training import page, plots, results
from apex.commands.bench.training.answer import answers
from apex.commands.bench.training.notes import notes
from apex.commands.bench.training.rows import rows
from apex.commands.bench.training.sentences import sentences
from apex.commands.bench.training.verdict import verdicts
from tests.commands.bench import made

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>alert(1)</script><b onload=x>'\"&{{ 7 * 7 }}"


class Elements(HTMLParser):
    """Collect start tags, text by the tag it is in, and what would be fetched."""

    VOID = ("meta", "link", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.links = [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # everything that is opened is closed, in order

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def _write(of, folder):
    found = verdicts(of)
    page.write(of, found, plots.draw(of, found, folder), folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(troubled, tmp_path_factory):
    """The page of a report with trouble."""
    folder, of = tmp_path_factory.mktemp("page"), made.troubled()
    page.write(of, verdicts(of), troubled.drawn, folder / "report.html")
    return folder


@pytest.fixture(scope="module")
def text(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def _said(text):
    return " ".join(" ".join(sum(Elements(text).text.values(), [])).split())


@pytest.mark.slow
def test_the_answer_comes_first_and_each_sentence_once(text):
    of = made.troubled()
    elements, said = Elements(text), _said(text)
    assert not elements.open
    found = verdicts(of)
    top = text[: text.index("<main>")]
    for answer in answers(of, found):
        assert str(markupsafe.escape(answer)).split("`")[0] in top
    for verdict in found:
        if verdict.other.level == "O0":
            for sentence in sentences(verdict):
                assert " ".join(sentence.split("`")[0].split()) in said
    for note in notes(of, found):
        assert said.count(note) == 1
    places = [text.index(f'<section id="{name}">') for name in
              ("verdicts", "overview", "questions", "plots", "numbers", "method")]  # fmt: skip
    assert places == sorted(places)


@pytest.mark.slow
def test_an_engineer_finds_what_is_asked_next(text):
    said = _said(text)
    for fact in ("Thinking Machine CM-5", "2.13.0", "avx512_bf16", "digits-cnn", "sgd",
                 "by the host's clock", "Bonferroni", "FP16 (digits-cnn, batch size 128, 512)",
                 "tokens cannot be halved", "54 trainings", "measured on a GPU only",
                 "apex beside torch's autocast", "same arithmetic", "s to target",
                 "a seed did not reach it", "inference ms", "mm float32",
                 "Click a heading to sort"):  # fmt: skip
        assert fact in said, fact
    drawn = re.findall(r'<figure id="plot-([\w-]+)"', text)
    assert drawn == ["overview", "time", "memory", "accuracy", "loss", "scale"]
    assert not re.search("QUICK|INCOMPLETE|BUSY", said)
    assert text.count("Thinking Machine") < 5  # not on every plot


def test_a_target_is_reached_by_all_seeds_that_ran():
    def seconds(**changes):
        one, *others = made.level("O4", accuracy=(98.0,) * 3)
        (row,) = rows(made.of_runs(made.without(one, **changes), *others, target=97.0))
        return row.seconds_to_target

    assert seconds() is not None
    assert seconds(status="failed", **made.NOTHING) is None


@pytest.mark.slow
def test_no_table_has_more_columns_than_fit(text):
    for table in re.findall("<thead>.*?</thead>", text, re.DOTALL):
        assert table.count("<th ") <= page.MAIN + 3


@pytest.mark.slow
def test_with_one_batch_size_speed_and_time_are_not_there_twice(tmp_path):
    cells = [made.cell(level, seed=seed) for level in ("O0", "O1") for seed in range(3)]
    text = _write(made.report(cells), tmp_path)
    assert re.findall(r'<figure id="plot-([\w-]+)"', text) == ["overview", "loss", "scale"]
    assert (tmp_path / "time.png").exists()


@pytest.mark.slow
def test_the_page_needs_no_network_and_no_other_file(text):
    elements = Elements(text)
    assert all(link.startswith(("#", "data:")) for link in elements.links)
    assert not {"img", "iframe", "object", "embed", "base"} & set(elements.tags)
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


@pytest.mark.slow
def test_the_raw_results_are_in_it_to_the_last_bit(text, tmp_path):
    [raw] = re.findall(r'<script type="application/json" id="raw">(.*?)</script>', text, re.DOTALL)
    (tmp_path / "results.json").write_text(raw, encoding="utf-8")
    assert repr(results.read(tmp_path / "results.json")) == repr(made.troubled())  # nan != nan


@pytest.mark.slow
def test_hostile_names_and_errors_are_only_text_and_marks_are_once_at_the_top(tmp_path):
    """The run is quick, incomplete, and was beside other work; to draw it takes 2 s."""
    levels = ("O0", "O1", "O4", "O5")
    cells = [made.cell(level, task=HOSTILE, quick=True) for level in levels]
    failed = made.run(cells[1], status="failed", error=f"ValueError: {HOSTILE}")
    around = {"notes": {"time": HOSTILE}, "environment": {**made.CPU, "x": HOSTILE}}
    busy = [made.run(cells[place], waited=0.6) for place in (0, 2)]
    of = made.report(cells, [busy[0], failed, busy[1]], **around)
    text = _write(of, tmp_path)
    elements = Elements(text)
    assert elements.tags.count("script") == 2
    assert "b" not in elements.tags
    assert "alert(1)" not in "".join(elements.text["script"][-1:])
    assert HOSTILE in elements.text["h1"][0]
    [raw] = re.findall(r'id="raw">(.*?)</script>', text, re.DOTALL)
    assert json.loads(raw)["plan"][0]["task"] == HOSTILE
    for mark in (
        "INCOMPLETE: 3 of 4 runs", "QUICK", "do not quote its numbers", "BUSY MACHINE: other",
    ):  # fmt: skip
        assert text.count(mark) == 1
        assert mark in text[: text.index("<main>")]


@pytest.mark.parametrize("runs", [0, 1])
@pytest.mark.slow
def test_a_page_of_almost_nothing(runs, tmp_path):
    cells = [made.cell("O4"), made.cell("O5")]
    text = _write(made.report(cells, [made.run(cell) for cell in cells[:runs]]), tmp_path)
    assert not Elements(text).open
    assert "Nothing can be compared" in text


# --- in a browser --------------------------------------------------------------------------------

browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser to look with: apt-get install chromium"
)
# Tries the page out as a user would, and writes what happened where --dump-dom shows it.
TRY = """
<script>
document.querySelectorAll("details").forEach((part) => { part.open = true; });
const table = document.querySelector("#numbers table");
const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent.trim());
const column = heads.indexOf("ms per step");
const read = () => ({
  order: [...table.tBodies[0].rows].map((row) => row.cells[column].textContent),
  sort: table.tHead.rows[0].cells[column].getAttribute("aria-sort"),
});
const button = table.tHead.rows[0].cells[column].firstElementChild;
const found = { before: read() };
button.click();
found.up = read();
button.focus();
found.focused = document.activeElement === button;
button.click();
found.down = read();
found.wide = document.documentElement.scrollWidth > window.innerWidth;
found.download = document.getElementById("download").href.slice(0, 5);
found.sizes = [...document.querySelectorAll("figure svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height];
}).filter((size) => size[0]);
const cut = (box) => box.scrollWidth > box.clientWidth;
found.cut = [...document.querySelectorAll(".scroll")].filter(cut).length;
console.log("FOUND" + JSON.stringify(found));
</script>
"""


def browse(file, folder, *options):
    """Open a page without a network; return what it said on its console."""
    words = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=1000", *options,
        file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def found_in(line):
    """Read what TRY wrote."""
    return json.loads(re.search(r'FOUND(\{.*\})", source', line)[1].replace('\\"', '"'))


def _numbers(cells):
    return [float(cell) for cell in cells if cell != "—"]


def _try(folder, text, width, dark):
    """Open a page in a frame, as a window cannot be as narrow as a phone."""
    (folder / "tried.html").write_text(text.replace("</body>", f"{TRY}</body>"), encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(f'<body style="margin:0"><iframe src="tried.html" '
                     f'style="width:{width}px;height:3000px;border:0"></iframe>')  # fmt: skip
    shot = folder / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    said = browse(frame, folder, f"--screenshot={shot}", f"--window-size={width},3000", scheme)
    assert len(said) == 1, said  # no error, no warning: only what TRY says
    return found_in(said[0]), np.asarray(Image.open(shot).convert("RGB"))[:, :width]


@browser
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.slow
def test_the_page_in_a_browser(width, dark, text, tmp_path):
    found, image = _try(tmp_path, text, width, dark)
    assert not found["wide"]
    if width == 1200:
        assert found["cut"] == 0
    assert len(found["sizes"]) == 6
    assert all(w > min(350, width - 40) and h > 200 for w, h in found["sizes"])
    assert found["download"] == "blob:"
    assert found["focused"]
    assert [found[when]["sort"] for when in ("before", "up", "down")] == [
        None, "ascending", "descending"
    ]  # fmt: skip
    order = _numbers(found["before"]["order"])
    assert _numbers(found["up"]["order"]) == sorted(order) != order
    assert _numbers(found["down"]["order"]) == sorted(order, reverse=True)
    for direction in ("up", "down"):  # what was not measured stays last
        assert found[direction]["order"][-2:] == ["—", "—"]
    bright = image.mean(-1)
    assert (np.median(bright) < 60) == dark
    assert ((bright > 180) == dark).mean() > 0.01  # there is text on it
    for colour in ("0072B2", "D55E00", "009E73", "56B4E9", "E69F00"):  # of levels
        level = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
        assert (np.abs(image.reshape(-1, 3) - level).max(1) < 4).sum() > 300, colour
