"""Batches and outputs of popular classes at a level that casts them.

What comes out has the same class, and what was one object in it stays one.
"""

import collections
import dataclasses
import functools
import types
import typing

import pytest
import torch
from torch import nn

from apex.amp.casting.containers import Walker, applier
from tests.amp.levels import cast

HALF = torch.float16
HALVES = {"O2": HALF, "O5": torch.bfloat16}


class Echo(nn.Linear):
    """Remembers what it was given, and returns its first argument."""

    def __init__(self):
        super().__init__(1, 1)

    def forward(self, *args, **kwargs):
        self.seen = args, kwargs
        return args[0]


def wide():
    return torch.ones(2)


def seen(value):
    """What a model at O2 gets for ``value``."""
    model = cast("O2", Echo())
    model(value)
    return model.seen[0][0]


# -- classes with attributes ----------------------------------------------------------------------


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class DotDict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Slots(dict):
    __slots__ = ("mask",)
    __getattr__ = dict.__getitem__


class Ordered(collections.OrderedDict):
    """Its constructor takes an argument of its own, and attributes are items."""

    def __init__(self, size, **items):
        super().__init__(**items)
        self.size = size
        for name, item in items.items():
            setattr(self, name, item)


class Tree(collections.defaultdict):
    def __init__(self):
        super().__init__(Tree)


class Rows(list):
    def __init__(self, first, mask):
        super().__init__([first])
        self.mask, self.first = mask, first


class Fixed(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Group(set):
    def __init__(self, *items):
        super().__init__(items)


class Last(collections.deque):
    def __init__(self, item):
        super().__init__([item], 3)


class Mapped(collections.abc.Mapping):
    """A mapping without a copy of its own that keeps items in an attribute."""

    def __init__(self, item):
        self.items_of_it = {"x": item}

    def __getitem__(self, key):
        return self.items_of_it[key]

    def __iter__(self):
        return iter(self.items_of_it)

    def __len__(self):
        return len(self.items_of_it)


class Images(collections.abc.Sequence):
    def __init__(self, images, *, crop):
        self.images, self.crop = images, crop

    def __getitem__(self, index):
        return self.images[index]

    def __len__(self):
        return len(self.images)


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    size: dataclasses.InitVar[int]

    def __post_init__(self, size):
        self.size = size

    @functools.cached_property
    def mean(self):
        return self.image.mean()

    @functools.cached_property
    def again(self):
        return self.image


def test_an_attr_dict_stays_its_own_attributes():
    got = seen(AttrDict(image=wide(), size=3))
    assert type(got) is AttrDict
    assert got.image is got["image"]
    assert (got.image.dtype, got.size) == (HALF, 3)
    got.loss = 1
    assert got["loss"] == 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_dict_whose_getattr_is_getitem(level):
    model = cast(level, Echo())
    value = DotDict(image=wide(), number=1)
    out = model(value)
    assert out.image.dtype == torch.float32
    assert type(model.seen[0][0]) is DotDict
    assert model.seen[0][0].image.dtype == (HALF if level == "O2" else torch.float32)


def test_items_and_attributes_that_are_one_tensor_stay_one():
    x, mask = wide(), wide()
    got = seen(Ordered(2, b=x, a=x))
    assert list(got) == ["b", "a"]
    assert got["b"] is got["a"] is got.a is got.b
    assert (got.b.dtype, got.size) == (HALF, 2)
    got = seen(Rows(x, mask))
    assert got[0] is got.first
    assert (got.first.dtype, got.mask.dtype) == (HALF, HALF)
    slots = Slots(x=x)
    slots.mask = x
    got = seen(slots)
    assert got.mask is got["x"]
    assert got.mask.dtype == HALF


def test_cached_properties_have_the_type_of_what_they_are_of():
    sample = Sample(wide(), 4)
    assert sample.mean.dtype == sample.again.dtype == torch.float32
    got = seen(sample)
    assert got.again is got.image
    assert (got.image.dtype, got.mean.dtype, got.size) == (HALF, HALF, 4)
    assert sample.image.dtype == torch.float32


def test_subclasses_whose_constructor_takes_other_arguments():
    x = wide()
    tree = Tree()
    tree["a"]["x"] = x
    got = seen(tree)
    assert got["a"]["x"].dtype == HALF
    assert type(got["new"]) is Tree
    for value in (Fixed(x, 1), Group(x), Last(x), Images([x], crop=3)):
        got = seen(value)
        assert type(got) is type(value)
        assert next(iter(got)).dtype == HALF
        assert next(iter(value)).dtype == torch.float32
    assert seen(Last(x)).maxlen == 3
    assert seen(Images([x], crop=3)).crop == 3
    mapped = Mapped(x)
    assert seen(mapped)["x"].dtype == HALF
    assert mapped["x"] is x
    found = seen(torch.max(torch.ones(2, 2), dim=1))  # a class of torch's with named fields
    assert type(found) is torch.return_types.max
    assert found.values.dtype == HALF


class Lazy(dict):
    """Loads an item when it is asked for."""

    def __getitem__(self, key):
        return super().__getitem__(key)()

    def items(self):
        return [(key, self[key]) for key in self]

    def __setitem__(self, key, value):
        super().__setitem__(key, lambda: value)


def test_a_dict_that_makes_its_items():
    batch = Lazy()
    batch["x"], batch["n"] = wide(), 3
    got = seen(batch)
    assert type(got) is Lazy
    assert dict(got.items())["n"] == 3
    assert got["x"].dtype == HALF
    assert batch["x"].dtype == torch.float32


def test_views_that_nothing_can_be_put_into():
    items = {"x": wide()}
    assert seen(types.MappingProxyType(items))["x"].dtype == HALF
    assert seen(view := items.items()) is view


def test_one_object_in_is_one_object_out_over_all_arguments():
    model, x, rows = cast("O2", Echo()), wide(), [wide()]
    model(x, rows, [x], {"rows": rows}, named=x)
    (first, second, third, fourth), named = model.seen
    assert first is third[0] is named["named"]
    assert second is fourth["rows"]
    assert second[0].dtype == HALF


def test_a_container_that_holds_itself():
    rows = [wide()]
    rows.append(rows)
    assert seen(rows)[0].dtype == HALF


class Made(collections.abc.Sequence):
    """Makes items when they are asked for."""

    __slots__ = ("numbers",)

    def __init__(self, numbers):
        self.numbers = [*map(float, numbers)]

    def __getitem__(self, index):
        return torch.tensor(self.numbers[index])

    def __len__(self):
        return len(self.numbers)


def test_objects_made_on_the_way_are_not_taken_for_one_another():
    """Ids of objects that are gone are used again."""
    walk = Walker(lambda x: -x)
    for first in range(0, 50, 10):
        assert walk(Made(range(first, first + 10))).numbers == [
            -x for x in range(first, first + 10)
        ]


# -- objects with a method to ---------------------------------------------------------------------


class InPlace:
    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        self.x = self.x.to(dtype)


class OnlyDevices(dict):
    """Refuses dtypes, and is a container."""

    error = ValueError

    def to(self, device):
        raise self.error(f"{device} is no device")


class Proxy:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Answers:
    """Has whatever it is asked for, but no method ``to``."""

    def __getattr__(self, name):
        return Answers()

    def __call__(self, *args):
        raise AssertionError("called")


class Raises:
    def __getattr__(self, name):
        raise LookupError(name)


def test_an_object_that_is_cast_in_place():
    value = InPlace(wide())
    assert applier(value, lambda one: one.to(HALF)) is value
    assert value.x.dtype == HALF


class Padded:
    """As detectors write it: ``to`` was made for devices, and does not look at types."""

    def __init__(self, x, mask, ids):
        self.x, self.mask, self.others = x, mask, [ids]

    def to(self, where):
        assert self.mask.type() == "torch.BoolTensor"
        return Padded(self.x.to(where), self.mask.to(where), self.others[0].type(where))


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_to_of_an_object_leaves_masks_indices_and_complex_tensors_alone(level):
    mask, ids = torch.tensor([True, False]), torch.tensor([4099, 1])
    model = cast(level, Echo())
    for index in (ids, ids * 1j):
        model(Padded(wide().double(), mask, index))
        batch = model.seen[0][0]
        assert batch.x.dtype == HALVES.get(level, torch.float32)
        assert batch.mask is mask
        assert batch.others[0] is index


@pytest.mark.parametrize("error", [ValueError, RuntimeError, TypeError])
def test_an_object_whose_to_takes_no_dtype_is_a_container_still(monkeypatch, error):
    monkeypatch.setattr(OnlyDevices, "error", error)
    assert seen(OnlyDevices(x=wide()))["x"].dtype == HALF


def test_memory_that_runs_out_in_a_cast_is_raised(monkeypatch):
    monkeypatch.setattr(OnlyDevices, "error", torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        seen(OnlyDevices(x=wide()))


def test_methods_to_that_are_not_of_the_class():
    assert seen(Proxy(wide())).dtype == HALF
    own = types.SimpleNamespace(to=lambda dtype: dtype)
    assert seen(own) == HALF
    for value in (Answers(), Raises(), types.SimpleNamespace(to="Paris")):
        assert seen(value) is value
    mail = DotDict(to=wide())  # an item, no method
    assert seen(mail)["to"].dtype == HALF


# -- in a compiled model --------------------------------------------------------------------------


class Both(typing.NamedTuple):
    x: torch.Tensor
    size: int = 2


class Named(dict):
    pass


@pytest.mark.slow
def test_containers_in_a_graph_of_torch_compile():
    """Code that Dynamo cannot trace would break it."""
    model = cast("O2", Echo())

    def outputs(x):
        made = Both(x), Named(x=x), {"x": [x]}, Sample(x, 3)
        both, named, plain, sample = [model(value) for value in made]
        return both.x + named["x"] + plain["x"][0] + sample.image

    x = wide()
    compiled = torch.compile(outputs, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), outputs(x))
    assert compiled(x).dtype == torch.float32
