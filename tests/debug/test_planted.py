"""A fault planted in each module of five models: the report names it, in every case."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.debug.planted import LEVELS, MODELS, Training, explained, mlp, plant

HALF = {"O1": torch.float16, "O2": torch.float16, "GradScaler": torch.float16}
NAMES = ("name", "place", "path", "direction", "value", "where", "level")
SAMPLE = 83  # every so many cases run by default; coprime to the lengths of all lists


HARMLESS = {("GAN", 0, "3", "forward", value) for value in ("inf", "beyond")}  # tanh(inf) is 1


def cases():
    """All cases; those outside of the sample run under --all only."""
    modules = [
        (name, place, path)
        for name, build in MODELS.items()
        for place, model in enumerate(build())
        for path, _ in model.named_modules()
    ]
    every = itertools.product(
        modules, ("forward", "backward"), ("nan", "inf", "beyond"), ("one", "all"), LEVELS
    )
    for number, ((name, place, path), direction, value, where, level) in enumerate(every):
        yield pytest.param(
            *(name, place, path, direction, value, where, level),
            id=f"{name}{place or ''}-{path or 'itself'}-{direction}-{value}-{where}-{level}",
            marks=[] if number % SAMPLE == 0 else pytest.mark.exhaustive,
        )


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(NAMES, list(cases()))
def test_names_module_direction_and_cause(name, place, path, direction, value, where, level):
    def prepare(models):
        plant(models[place].get_submodule(path), direction, value, where, HALF.get(level))

    training = Training(name, level, prepare)
    report = training.explain_first()

    is_harmless = (name, place, path, direction, value) in HARMLESS
    if is_harmless or (value == "beyond" and level not in HALF):
        assert report is None  # 1e6 is no large number in float32 and bfloat16
        return
    front = type(training.models[place]).__name__ if name == "GAN" else ""
    expected = ".".join(part for part in (front, path) if part)
    causes = {"forward": "range", "backward": "scale"}
    cause = causes[direction] if value == "beyond" else "model"
    operations = {"nan": "sqrt", "inf": "div", "beyond": "mul_"}
    assert report is not None
    operation = report.operation and report.operation.split(".")[1]
    found = (report.module, report.direction, report.cause, operation)
    assert found == (expected, direction, cause, operations[value]), report.text()


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("value", "level"), [("nan", "O0"), ("inf", "GradScaler"), ("beyond", "O2"), ("nan", "O1")]
)
def test_in_a_checkpoint(reentrant, direction, value, level):
    def prepare(models):
        plant(models[0].layers[1].mlp[1], direction, value, "one", HALF.get(level))
        inner = models[0].layers[1].forward
        models[0].layers[1].forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)

    report = Training("transformer", level, prepare).explain_first()

    cause = "model"
    if value == "beyond":
        cause = "range" if direction == "forward" else "scale"
    found = (report.module, report.direction, report.cause)
    assert found == ("layers.1.mlp.1", direction, cause), report.text()


@pytest.mark.filterwarnings("ignore")  # of Dynamo, at autograd functions
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [True, False])
def test_in_a_compiled_model(in_place, backend, direction):
    """What uncompiled code makes too is named as in uncompiled code."""
    torch.manual_seed(0)
    model = mlp()
    plant(model[2], direction, "nan", "one", None)
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    report = explained(model, lambda: model(torch.randn(4, 8)).square().mean())

    assert (report.module, report.direction, report.cause) == ("2", direction, "model")
    assert report.operation == "aten.sqrt.default"
