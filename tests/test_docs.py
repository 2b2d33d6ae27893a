"""The pages in ``docs`` and README: the tests that they name exist, and every code block runs."""

import ast
import functools
import os
import pathlib
import re

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import apex
from apex import amp

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "defects.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
DEFECTS = 47

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_blocks_of_a_page_run_as_one_program(page, tmp_path, monkeypatch):
    """What a page does not show, such as a model, is in a comment: ``invisible-code-block``."""
    examples = list(Sybil([PythonCodeBlockParser()]).parse(page).examples())
    assert len(examples) >= page.read_text().count("\n```python")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    amp.reset()
    try:
        for example in examples:
            example.evaluate()
    finally:
        amp.reset()
        os.environ.clear()  # a page sets what torchrun would
        os.environ.update(before)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def defects():
    _, _, after = PAGE.read_text().partition("## Every known defect of the original\n")
    section, _, _ = after.partition("\n## ")
    return {int(number): (phrase, cell) for number, phrase, cell in ROW.findall(section)}


@functools.cache
def functions(path):
    file = ROOT / path
    nodes = ast.parse(file.read_text()).body if file.exists() else []
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_the_table_has_every_defect_once_and_in_order():
    assert list(defects()) == list(range(1, DEFECTS + 1))
    phrases = [phrase for phrase, _ in defects().values()]
    assert len(set(phrases)) == DEFECTS


def test_every_defect_names_a_test():
    assert [number for number, (_, cell) in defects().items() if not NAMED.search(cell)] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("**/*.md")), ids=lambda p: p.name)
def test_every_test_that_a_page_names_exists(page):
    named = NAMED.findall(page.read_text())
    assert page.read_text().count("::test_") == len(named)  # each in the form that is looked for
    missing = [f"{path}::{name}" for path, name in named if name not in functions(path)]
    assert missing == []


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
READ = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/*/README.md")]
READ += [ROOT / "benchmarks" / "results" / "README.md"]


@pytest.mark.parametrize("page", sorted(set(READ)), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_page_links_to_exists(page):
    """Sphinx checks the pages of the site, their anchors too; this one README and the examples."""
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_the_page_of_amp_has_every_name_in_the_order_of_use():
    """A name that is added to ``apex.amp`` gets its place there by hand."""
    page = (ROOT / "docs" / "api" / "amp.md").read_text()
    found = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", page, re.MULTILINE)
    public = [name for name in amp.__all__ if callable(getattr(amp, name)) and name[0] != "_"]
    assert sorted(found) == sorted(public)
    assert found[:2] == ["initialize", "scale_loss"]


def test_the_site_begins_with_the_first_page_of_readme():
    index = (ROOT / "docs" / "index.md").read_text()
    directive, _, _ = index.partition("\n```\n")
    lines = directive.splitlines()
    assert lines[:2] == ["```{include} ../README.md", ":relative-docs: docs/"]
    _, _, end = lines[2].partition(':end-before: "')
    first, _, after = (ROOT / "README.md").read_text().partition(end.rstrip('"'))
    assert first.startswith("# apex\n")
    assert after.startswith("\n\n## ")


WIDEST = 100  # characters of code beside both side bars, in a window of 1280 pixels


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_code_is_cut_by_the_site(page):
    """Measured in Chromium. In narrow windows the box of the code scrolls."""
    fenced = re.compile(r"^( *)```(.*?\n.*?)^\1```$", re.MULTILINE | re.DOTALL)
    indented = re.compile(r"(?<=\n\n)(?=( {4}))((?: {4}.*\n)+)")
    text = page.read_text()
    blocks = [*fenced.findall(text), *indented.findall(fenced.sub("", text))]
    lines = [
        line.removeprefix(by)
        for by, block in blocks
        if block[0] != "{"
        for line in block.splitlines()
    ]
    assert [line for line in lines if len(line) > WIDEST] == []


@pytest.mark.parametrize("lines", [" -", " +"], ids=["before", "after"])
def test_the_change_that_readme_shows_is_a_program_before_and_after(lines):
    """The lines with a minus, or those with a plus, and those that stay."""
    (diff,) = re.findall(r"^```diff\n(.+?)^```", PAGES[0].read_text(), re.M | re.S)
    program = "\n".join(line[1:] for line in diff.splitlines() if line[0] in lines)
    model = torch.nn.Linear(4, 2, device="cpu", dtype=torch.float32)
    weight = model.weight.detach().clone()
    given = {
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [torch.ones(3, 4, device="cpu", dtype=torch.float32)] * 2,
        "loss_of": lambda model, batch: model(batch).float().square().mean(),
    }  # fmt: skip
    amp.reset()
    try:
        exec(compile(program, "README.md", "exec"), given)
        half = model(torch.ones(3, 4, device="cpu", dtype=torch.float32)).dtype is torch.bfloat16
    finally:
        amp.reset()
    assert not torch.equal(model.weight, weight)
    assert half == ("amp.scale_loss(" in program) == (lines == " +")


def test_changelog_and_wheels_on_pages_have_the_version_of_the_package():
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (?:\[Unreleased\] |\[)(\d[\w.]*)", changes, re.MULTILINE)
    assert versions[0] == apex.__version__
    wheels = [name for page in PAGES for name in re.findall(r"apex-(\d\S+?)-py3", page.read_text())]
    assert set(wheels) == {apex.__version__}


# --- old lines and their errors ------------------------------------------------------------------

OLD = {  # what a row of from-apex.md quotes as the error -> the old line
    "No module named 'torch._six'": "from torch._six import inf",
    "invalid index of a 0-dim tensor": "x.sum().data[0]",
    "Weights only load failed": "torch.save(layer, 'layer.pt'); torch.load('layer.pt')",
    "Subtraction": "1 - (x > 0)",
    "only supports boolean masks": "x.masked_scatter((x > 0).byte(), x)",
    "expected BoolTensor": "x.masked_select((x > 0).byte())",
    "cannot import name 'Sequence'": "from collections import Sequence",
    "unexpected keyword argument": "lr_scheduler.ReduceLROnPlateau(optimizer, verbose=True)",
    "unsupported ScalarType BFloat16": "x.bfloat16().numpy()",
    "mat1 and mat2 must have the same dtype": "layer.half()(x)",
    "expected m1 and m2 to have the same dtype": "torch.mm(x, x.t().half())",
}


@pytest.mark.parametrize("error", OLD)
def test_an_old_line_raises_what_its_row_says(error, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "from-apex.md").read_text()
    assert re.search(rf"^\| .*`[^`]*{re.escape(error)}[^`]*`.* \| .* \|$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    layer = torch.nn.Linear(3, 3, device="cpu", dtype=torch.float32)
    given = {
        "torch": torch, "layer": layer, "lr_scheduler": torch.optim.lr_scheduler,
        "x": torch.ones(2, 3, device="cpu", dtype=torch.float32),
        "optimizer": torch.optim.SGD(layer.parameters(), lr=0.1),
    }  # fmt: skip
    with pytest.raises(Exception, match=re.escape(error)):
        exec(OLD[error], given)


# --- where numbers come from ---------------------------------------------------------------------

RESULTS = ROOT / "benchmarks" / "results"
MEASURED = re.compile(
    r"\d ?(ms|us|ns|TB/s|GiB|MiB|GB/s)\b|\d s\b|\d bytes an? |\d roundings after|by at most \d\S*e-"
    r"|times (the speed|as (fast|long|much)|float32's|that (of|by)|torch's|the memory)"
    r"|\d\.\d+ times|\| [\d.,]+ \|.*\| [\d.,]+ \|"
)


def measured_sections(text):
    """The headings under which a line has a time, bytes, a ratio or a row of numbers."""
    found, heading, in_code = {}, "", False
    for line in text.splitlines():
        in_code ^= line.startswith("```")
        if line.startswith("#") and not in_code:
            heading = line.strip("# ")
        elif MEASURED.search(line):
            found[heading] = line
    return found


def sources():
    rows = [line.split(" | ") for line in (RESULTS / "README.md").read_text().splitlines()]
    return {(row[0].strip("| "), row[1].strip()): row[2] for row in rows if ".md" in row[0]}


def test_every_section_with_a_measured_number_says_where_it_is_from():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    measured = {
        (str(page.relative_to(ROOT)), heading): line
        for page in pages
        if page.name != "changelog.md"
        for heading, line in measured_sections(page.read_text()).items()
    }
    listed = sources().keys()
    assert {place: measured[place] for place in measured.keys() - listed} == {}
    assert [place for place, file in sources().items() if "](" not in file] == []
    gone = {place for place in listed if f"# {place[1]}\n" not in (ROOT / place[0]).read_text()}
    assert gone == set()  # that are on no page any more


def test_every_results_file_is_listed():
    listed = " ".join(sources().values())
    files = [file.name for kind in ("*.json", "*.txt") for file in RESULTS.glob(kind)]
    assert files
    assert [name for name in files if f"({name})" not in listed] == []


OF_A_LEVEL = re.compile(r"times (?:as fast|the speed)")


@pytest.mark.parametrize("page", PAGES[:1] + [p for p in PAGES if p.parent.name == "docs"], ids=str)
def test_a_speed_of_a_level_stands_beside_torchs_own(page):
    """A sentence that names how fast a level or a 16-bit type is names torch's autocast."""
    sentences = re.split(r"\n\n|(?<=\.)\s+(?=[A-Z*`(])", page.read_text())
    alone = [
        text
        for text in sentences
        if OF_A_LEVEL.search(text)
        and re.search(r"\bO[1-5]\b|With bfloat16", text)
        and not re.search(r"autocast|native-", text)
    ]
    assert alone == []
