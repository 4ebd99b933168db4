"""The checks that all other tests run under: a wrong type or shape is found at the call, whatever the function is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

from floatscope.files.sizes import format_size
from type_checks import check, unchecked

VIOLATIONS = (BeartypeCallHintViolation, TypeCheckError)


def checked(target):
    return check(target, typechecker=beartype)


@checked
def repeat(text: str, times: int = 2) -> str:
    return text * times if times else None


@checked
def multiply(rows: Float[Tensor, "row inner"], columns: Float[Tensor, "inner column"]) -> Float[Tensor, "row column"]:
    product = rows @ columns
    return product if product.numel() < 100 else product.T


@checked
def walk(tokens: Int[Tensor, "batch length"], weights: Float[Tensor, " length"]) -> Iterator[Float[Tensor, " batch"]]:
    yield weights.sum()


@checked
def defined_below(value: Later) -> Later:
    return value


@checked
@dataclass(frozen=True)
class Later:
    left: Float[Tensor, " length"]
    right: Float[Tensor, " length"]


def make_adder(amount: int):
    @checked
    def add(number: int, again: bool = False) -> int:
        return make_adder(amount)(number + amount) if again else number + amount

    return add


def make_cutter(length: int):
    @checked
    def cut(left: Float[Tensor, " length"], right: Float[Tensor, " length"]) -> Float[Tensor, " length"]:
        return (left + right)[:length]

    return cut


LONG, SHORT = torch.zeros(4), torch.zeros(3)
RIGHT_CALLS = {
    "a type": lambda: repeat("a", times=3),
    "a shape": lambda: multiply(torch.zeros(2, 3), torch.zeros(3, 4)),
    "a generator": lambda: walk(torch.zeros(2, 3, dtype=torch.long), SHORT),
    "a dataclass": lambda: Later(SHORT, SHORT),
    "a name that is defined below": lambda: defined_below(Later(SHORT, SHORT)),
    "a function in a function": lambda: make_adder(1)(2),
    "a shape in a function in a function": lambda: make_cutter(3)(SHORT, SHORT),
}
WRONG_CALLS = {
    "a type": lambda: repeat(3),
    "a type by name": lambda: repeat("a", times="b"),
    "a result": lambda: repeat("a", 0),
    "a kind of number": lambda: multiply(torch.zeros(2, 3), torch.zeros(3, 4, dtype=torch.long)),
    "a number of axes": lambda: multiply(torch.zeros(2, 3), SHORT),
    "an axis with two sizes": lambda: multiply(torch.zeros(2, 1), torch.zeros(3, 4).T),
    "the shape of a result": lambda: multiply(torch.zeros(20, 3), torch.zeros(3, 30)),
    "an argument of a generator": lambda: walk(torch.zeros(2, 3, dtype=torch.long), LONG),
    "the fields of a dataclass": lambda: Later(SHORT, LONG),
    "a name that is defined below": lambda: defined_below(SHORT),
    "an argument of a function in a function": lambda: make_adder(1)("2"),
    "the result of a function in a function": lambda: make_adder(0.5)(2),
    "a shape in a function in a function": lambda: make_cutter(3)(SHORT, LONG),
    "the shape of a result in a function in a function": lambda: make_cutter(2)(SHORT, SHORT),
    "a function of the package": lambda: format_size("1"),
}


@pytest.mark.parametrize("name", RIGHT_CALLS)
def test_right_calls_pass(name):
    for _ in range(2):  # the first call decorates the function
        RIGHT_CALLS[name]()


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_are_found(name):
    for _ in range(2):
        with pytest.raises(VIOLATIONS):
            WRONG_CALLS[name]()


def test_axes_of_a_call_are_not_those_of_the_next():
    for size in (2, 5, 3):
        assert multiply(torch.zeros(size, 3), torch.zeros(3, size)).shape == (size, size)


def test_mistakes_reach_the_function_where_the_checks_are_off():
    with unchecked():
        assert repeat(3) == 6
    with pytest.raises(VIOLATIONS):
        repeat(3)


def test_functions_in_functions_stay_apart():
    one, ten = make_adder(1), make_adder(10)
    assert [one(1), ten(1), one(2), ten(1, again=True), one(3)] == [2, 11, 3, 21, 4]
