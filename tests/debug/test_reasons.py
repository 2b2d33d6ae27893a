"""What a report says of the arguments of the operation that broke, and what it leaves unsaid."""

import math

import pytest
import torch

from apex.debug.reasons import reason
from tests.debug.planted import explained

ZEROS, ONES, INF = torch.zeros(4), torch.ones(4), torch.full((4,), math.inf)
SOME = torch.tensor([1.0, 0.0, 2.0, 0.0])
ABOVE = "clamp the argument above 0"
DIVISOR = "the divisor is 0; add a small number to it"
LARGEST = "subtract the largest, or clamp the argument"
SAID = [  # operation, node of autograd, arguments, reason
    ("div", "", (ONES, SOME), DIVISOR),
    ("div", "", (SOME, 0.0), DIVISOR),
    ("div_", "", (ZEROS, ZEROS), DIVISOR),
    ("reciprocal", "", (SOME,), DIVISOR),
    ("div", "DivBackward0", (ONES, SOME), DIVISOR),
    ("div", "LinalgSvdBackward0", (ONES, ZEROS), "the divisor is 0"),
    ("div", "SqrtBackward0", (ONES, SOME),
     "the derivative of a root at 0 is infinite; add a small number inside the root"),
    ("div", "LogBackward0", (ZEROS, SOME),
     "the derivative of a logarithm at 0 is infinite, and infinity times a gradient of 0 is "
     f"NaN; {ABOVE}"),
    ("pow", "PowBackward0", (SOME, -0.5),
     "the derivative of a power below 1 at 0 is infinite; add a small number to its base"),
    ("log", "PowBackward1", (-ONES,),
     "the derivative with respect to the exponent needs the logarithm of the base; clamp the base "
     "above 0"),
    ("rsqrt", "AcosBackward0", (ZEROS,),
     "the derivative of acos and asin at 1 and -1 is infinite; clamp the argument closer to 0"),
    ("pow", "", (SOME, -1.0),
     "the base is 0 and the exponent negative; add a small number to the base"),
    ("pow", "", (-ONES, 0.3), "the base is negative and the exponent a fraction; clamp the base"),
    ("log", "", (SOME,), f"its argument is 0; {ABOVE}"),
    ("log", "", (SOME - 1.5,), f"its arguments range from -1.5 to -0.5; {ABOVE}"),
    ("sqrt", "", (-ONES,), f"its argument is -1; {ABOVE}"),
    ("acos", "", (ONES + 1e-6,), "its argument is 1.000001; clamp the argument between -1 and 1"),
    ("acos", "", (ONES.double() + 1e-9,),
     "its argument is 1.000000001; clamp the argument between -1 and 1"),
    ("exp", "", (100 * ONES,), f"its argument is 100; {LARGEST}"),
    ("exp", "", ((12 * ONES).half(),), f"its argument is 12; {LARGEST}"),
    ("mul", "", (SOME, INF), "0 times inf; use torch.where instead of a product"),
    ("sub", "", (INF, INF), "inf - inf"),
    ("mean", "", (torch.ones(0),), "the mean of no elements; skip such a batch"),
    ("std", "", (torch.ones(1, 4), [0]), "with correction=1 it needs more than 1 value"),
    ("div", "", (2e9 * ONES, 1e-30), "the divisor is as small as 1e-30"),
    ("mul", "", (1e30 * ONES, 1e20), "its inputs reach 1e+30"),
    ("mm", "", (1e30 * torch.ones(2, 2), 1e20 * torch.ones(2, 2)), "its inputs reach 1e+30"),
    ("sum", "", (3e38 * ONES,), "its inputs reach 3e+38"),
]  # fmt: skip
UNSAID = [  # not of each place of a result that is inf throughout
    ("div", "", (ONES, SOME)),
    ("log", "", (SOME,)),
    ("pow", "", (SOME, -1.0)),
    ("mul", "", (60000 * ONES.half(), 2)),
    ("lgamma", "", (ZEROS,)),
    ("lgamma", "", ([ONES],)),
    ("div", "", ()),
]


@pytest.mark.parametrize("case", SAID, ids=lambda case: f"{case[0]} {case[1]}")
@pytest.mark.filterwarnings("ignore:std")
def test_the_reason_is_read_from_the_arguments(case):
    name, node, args, said = case
    assert reason(name, node, args, {}, getattr(torch, name.rstrip("_"))(*args)) == said


@pytest.mark.parametrize("case", UNSAID, ids=lambda case: case[0])
def test_nothing_is_said_of_what_arguments_do_not_show(case):
    assert reason(*case, {}, INF) == ""


class Unit(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x / x.square().sum(1, keepdim=True).sqrt().clamp(min=1e-8)


def test_a_sum_that_is_0_in_float16_alone_is_called_a_divisor_of_0():
    """1e-8 is 0 in float16; in float32 it is not."""
    torch.manual_seed(0)
    model = Unit(4, 4).half()
    x = torch.zeros(3, 4).half()
    model.bias.data.zero_()
    report = explained(model, lambda: model(x).float().sum())
    assert report.cause == "range"
    assert report.sentence.endswith("in float32: the divisor is 0; add a small number to it.")


def test_an_argument_that_is_written_to_later_does_not_count():
    class Writes(torch.nn.Linear):
        def forward(self, x):
            x = (super().forward(x) - 1).detach().abs()
            y = x.add(1) / x.zero_()
            x.fill_(1.0)
            return y + super().forward(x)

    torch.manual_seed(0)
    model = Writes(4, 4)
    report = explained(model, lambda: model(torch.randn(3, 4)).sum(), told=True)
    assert report.sentence.endswith("of 12 values: the divisor is 0; add a small number to it.")
