"""Paragraphs of SymPy's docstrings, each with the part of mathematics that it is about."""

import ast
import hashlib
import importlib.util
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from transformers import BertTokenizerFast, PreTrainedTokenizerBase

CLASSES = [  # folders of SymPy, which is installed wherever torch is
    *("polys", "physics", "solvers", "functions", "combinatorics"),
    *("matrices", "stats", "ntheory", "geometry", "tensor"),
]
HELD_OUT = 0.25  # of the paragraphs of each class
LEAST_WORDS = 8  # shorter paragraphs are headings and notes
WORDS = 4000  # in the vocabulary, beside the single characters
ENDING = 4  # letters of the longest ending in it


class Texts(NamedTuple):
    """Paragraphs and their classes, numbers from 0 to 9."""

    texts: list[str]
    labels: list[int]


def load(limit: int | None = None) -> tuple[Texts, Texts]:
    """Load the paragraphs to train on and those to test on.

    A file is in one of the two as a whole. A paragraph of both is taken out of the tests.

    Args:
        limit: Train on so many paragraphs only.
    """
    spec = importlib.util.find_spec("sympy")
    if spec is None or spec.origin is None:
        raise SystemExit("SymPy, whose docstrings are the data, is missing: pip install sympy")
    root, train, test = Path(spec.origin).parent, [], []
    for label, name in enumerate(CLASSES):
        files = {file: _paragraphs(file) for file in _sources(root / name)}
        most, taken = HELD_OUT * sum(map(len, files.values())), 0
        for file in sorted(files, key=lambda file: _hash(file.relative_to(root).as_posix())):
            held_out = taken + len(files[file]) <= most
            taken += len(files[file]) if held_out else 0
            (test if held_out else train).extend((text, label) for text in files[file])
    trained_on = {text for text, _ in train}
    test = [(text, label) for text, label in test if text not in trained_on]
    random.Random(0).shuffle(train)
    return Texts(*zip(*train[:limit], strict=True)), Texts(*zip(*test, strict=True))


def _sources(folder: Path) -> list[Path]:
    return [f for f in folder.rglob("*.py") if not {"tests", "benchmarks"} & {*f.parts}]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _paragraphs(file: Path) -> list[str]:
    """The paragraphs of all docstrings in ``file``, without the examples and without repeats."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for text in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = re.sub(r"sympy(\.\w+)+", "sympy", " ".join(text.split()))  # names the class
                if ">>>" not in text and len(re.findall("[a-zA-Z]{2,}", text)) >= LEAST_WORDS:
                    found[text] = None
    return list(found)


def fingerprint(*parts: Texts) -> str:
    """Digest texts and labels: another version of SymPy has others."""
    return _hash(repr(parts))


def tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    """Make a word-piece tokenizer of the characters, frequent words and endings in ``texts``.

    ``tokenizers`` could train one, but breaks ties otherwise in each run.
    """
    words = Counter(word for text in texts for word in re.findall("[a-z]+", text.lower()))
    pieces = Counter({word: count for word, count in words.items() if count > 2})
    for word, count in words.items():
        for start in range(max(1, len(word) - ENDING), len(word)):
            pieces["##" + word[start:]] += count
    characters = sorted({c for c in "".join(texts).lower() if c.isascii() and c.isprintable()})
    single = [prefix + c for prefix in ("", "##") for c in characters if c != " "]
    frequent = sorted(pieces, key=lambda piece: (-pieces[piece], piece))[:WORDS]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vocab.txt")
        file.write_text("\n".join(dict.fromkeys(special + single + frequent)), encoding="utf-8")
        return BertTokenizerFast(str(file))


def majority(train: Texts, test: Texts) -> float:
    """The accuracy of always naming the class that is the most frequent in training."""
    [(label, _)] = Counter(train.labels).most_common(1)
    return test.labels.count(label) / len(test.labels)


def bag_of_words(train: Texts, test: Texts) -> float:
    """The accuracy of a linear classifier of weighted word counts."""
    if len(set(train.labels)) == 1:  # LinearSVC refuses that
        return majority(train, test)
    model = make_pipeline(TfidfVectorizer(sublinear_tf=True), LinearSVC(C=0.3, random_state=0))
    return model.fit(*train).score(*test)
