"""The HTML report: what is in it, that nothing can be smuggled in, and how a browser takes it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from apex.bench.training import page, plots, results
from tests.bench import made

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


def _write(of, folder, *, draw=True):
    verdicts = made.verdicts(of)
    svgs = plots.draw(of, verdicts, folder) if draw else {}
    page.write(of, verdicts, svgs, folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page of a report with trouble, and what it was made of."""
    folder = tmp_path_factory.mktemp("page")
    _write(made.troubled((128, 512)), folder)
    return folder


@pytest.fixture(scope="module")
def text(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def test_a_sceptic_finds_what_is_needed(text):
    of = made.troubled((128, 512))
    elements = Elements(text)
    assert not elements.open
    said = " ".join(" ".join(sum(elements.text.values(), [])).split())
    for verdict in made.verdicts(of):
        assert verdict.sentence in said
    for fact in ("Thinking Machine CM-5", "2.13.0", "avx512_bf16", "digits-cnn", "sgd",
                 "by the host's clock", "95 % confidence interval", "pairs of seeds",
                 "FP16 (digits-cnn, batch size 128, 512)", "tokens cannot be halved",
                 "54 of 54 runs", "out of memory (1 of 3)",
                 "measured on a GPU only", "does not let its energy be read"):  # fmt: skip
        assert fact in said
    assert elements.tags.count("svg") == len(plots_of(text)) == 7
    assert "QUICK" not in said
    assert "INCOMPLETE" not in said


def plots_of(text):
    return re.findall(r'<figure id="plot-([\w-]+)"', text)


def test_verdicts_come_before_plots_and_plots_before_tables(text):
    places = [text.index(f'<section id="{name}">') for name in ("verdicts", "plots", "numbers")]
    assert places == sorted(places)
    assert places[-1] < text.index('<section id="method">')


def test_the_page_needs_no_network_and_no_other_file(text):
    elements = Elements(text)
    assert all(link.startswith(("#", "data:")) for link in elements.links)
    assert not {"img", "iframe", "object", "embed", "base"} & set(elements.tags)
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#\w+\)", "", text)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_the_raw_results_are_in_it_to_the_last_bit(text, tmp_path):
    [raw] = re.findall(r'<script type="application/json" id="raw">(.*?)</script>', text, re.DOTALL)
    (tmp_path / "results.json").write_text(raw, encoding="utf-8")
    of = made.troubled((128, 512))
    again = results.read(tmp_path / "results.json")
    assert repr(again.runs) == repr(of.runs)  # repr, as nan is not equal to itself
    assert again.environment == of.environment


def test_hostile_names_and_errors_are_only_text(tmp_path):
    cells = [made.cell(level, task=HOSTILE) for level in ("O0", "O1", "O4")]
    runs = [made.run(cells[0]), made.run(cells[1], status="failed", error=f"ValueError: {HOSTILE}")]
    of = made.report(cells, runs, notes={"time": HOSTILE}, environment={**made.CPU, "x": HOSTILE})
    text = _write(of, tmp_path)
    elements = Elements(text)
    assert elements.tags.count("script") == 2
    assert "b" not in elements.tags
    assert "alert(1)" not in "".join(elements.text["script"][-1:])
    assert "49" not in elements.text["h1"][0]
    assert HOSTILE in elements.text["h1"][0]
    [raw] = re.findall(r'id="raw">(.*?)</script>', text, re.DOTALL)
    assert json.loads(raw)["plan"][0]["task"] == HOSTILE


def test_incomplete_and_quick_are_marked_at_the_top(tmp_path):
    cells = [made.cell(level, quick=True) for level in ("O0", "O4")]
    text = _write(made.report(cells, [made.run(cells[0])]), tmp_path, draw=False)
    top = text[: text.index("<main>")]
    assert "INCOMPLETE: 1 of 2 runs" in top
    assert "QUICK" in top
    assert "do not quote its numbers" in top
    assert "a level shared a process here" in text
    assert "Each run had a process of its own" not in text


def test_a_search_for_the_largest_batch_alone_has_no_empty_sections(tmp_path):
    found = {"task": "digits", "level": "O1", "batch": 640, "limit_bytes": 2**30, "error": None}
    text = _write(made.report([], [], largest=(found,)), tmp_path, draw=False)
    headings = Elements(text).text
    assert headings["h2"] == ["Numbers", "How it was measured"]
    assert headings["h3"] == ["Largest batch that fits", "Machine and versions"]
    assert "0 of 0" not in text


@pytest.mark.parametrize("runs", [0, 1])
def test_a_page_of_almost_nothing(runs, tmp_path):
    cells = [made.cell("O4"), made.cell("O5")]
    text = _write(
        made.report(cells, [made.run(cell) for cell in cells[:runs]]), tmp_path, draw=False
    )
    assert not Elements(text).open
    assert "Nothing can be compared" in text


# --- in a browser --------------------------------------------------------------------------------

browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser to look with: apt-get install chromium"
)
# Tries the page out as a user would, and writes what happened where --dump-dom shows it.
TRY = """
<script>
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
});
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


@browser
def test_the_page_in_a_browser(folder, tmp_path):
    shot = tmp_path / "page.png"
    size = "--window-size=1200,3600"
    tried = tmp_path / "tried.html"
    text = (folder / "report.html").read_text(encoding="utf-8")
    tried.write_text(text.replace("</body>", f"{TRY}</body>"), encoding="utf-8")
    said = browse(tried, tmp_path, f"--screenshot={shot}", size)
    assert len(said) == 1, said  # no error, no warning: only what TRY says
    found = found_in(said[0])
    assert found["before"]["sort"] is None
    assert found["up"]["sort"] == "ascending"
    assert found["down"]["sort"] == "descending"
    order = _numbers(found["before"]["order"])
    assert _numbers(found["up"]["order"]) == sorted(order) != order
    assert _numbers(found["down"]["order"]) == sorted(order, reverse=True)
    for direction in ("up", "down"):  # what was not measured stays last
        assert found[direction]["order"][-2:] == ["—", "—"]
    assert found["focused"]
    assert not found["wide"]
    assert found["download"] == "blob:"
    assert len(found["sizes"]) == 7
    assert all(width > 350 and height > 200 for width, height in found["sizes"])

    image = np.asarray(Image.open(shot).convert("RGB")).reshape(-1, 3)
    assert len(np.unique(image // 8 @ np.array([1024, 32, 1]))) > 100
    for colour in ("0072B2", "D55E00", "009E73", "56B4E9", "E69F00"):  # bars and lines of levels
        level = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
        assert (np.abs(image - level).max(1) < 4).sum() > 1000, colour


@browser
def test_the_page_on_a_phone_in_the_dark(folder, tmp_path):
    text = (folder / "report.html").read_text(encoding="utf-8")
    (tmp_path / "tried.html").write_text(text.replace("</body>", f"{TRY}</body>"), encoding="utf-8")
    phone = tmp_path / "phone.html"  # a window cannot be as narrow as this frame
    phone.write_text('<body style="margin:0"><iframe src="tried.html" '
                     'style="width:360px;height:2000px;border:0"></iframe>')  # fmt: skip
    shot = tmp_path / "phone.png"
    dark = "--blink-settings=preferredColorScheme=0"
    said = browse(phone, tmp_path, f"--screenshot={shot}", "--window-size=600,2000", dark)
    assert len(said) == 1, said
    assert '\\"wide\\":false' in said[0] or '"wide":false' in said[0]
    image = np.asarray(Image.open(shot).convert("L"))[:, :360]
    assert np.median(image) < 60  # dark, with bright text on it
    assert (image > 180).mean() > 0.01
