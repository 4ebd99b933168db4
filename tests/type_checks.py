"""Checks of types and shapes at every call of a module's functions, installed before the modules are imported.

beartype checks the types in about 1 µs a call. A function with a shape in its annotations also gets a scope of
jaxtyping, in which an axis name has one size; jaxtyping's own decorator checks the same, but every argument twice and
at 50 µs a call. A function is decorated when it is first called: most tests call few of all functions, and names that
are defined below a function are known by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import isgeneratorfunction
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype

check_shapes = jaxtyping.jaxtyped
AXES = check_shapes("context")  # while it is entered, an axis name has one size


def install(modules: Sequence[str]) -> None:
    """Check the functions of these modules and of those below them."""
    jaxtyping.jaxtyped = check  # the name that the import hook writes above every function and class
    jaxtyping.install_import_hook(modules, "beartype.beartype")


def check(target: Any = None, *, typechecker: Any) -> Any:
    """Decorate a function, or the `__init__` of a dataclass."""
    if target is None:
        return partial(check, typechecker=typechecker)
    if isinstance(target, type) and "__init__" in vars(target) and hasattr(target, "__dataclass_fields__"):
        target.__init__ = check(target.__init__, typechecker=typechecker)
        return target
    if not isinstance(target, FunctionType):
        return check_shapes(target, typechecker=typechecker)
    return check_when_called(target, typechecker)


def check_when_called(function: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    checked: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        nonlocal checked
        if checked is None:
            checked = decorate(function, typechecker)
        return checked(*args, **options)

    return call


def decorate(function: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    try:
        known = {name: resolve(value, function) for name, value in function.__annotations__.items()}
    except NameError:  # imported for the type checker only
        return check_shapes(function, typechecker=typechecker)
    has_shapes = any(map(has_shape, known.values()))
    if has_shapes and isgeneratorfunction(function):  # the arguments must be checked at the call, not at the first item
        return check_shapes(function, typechecker=typechecker)
    function.__annotations__ = known
    checked = beartype(function)
    return check_axes(checked) if has_shapes else checked


def check_axes(checked: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with AXES:
            return checked(*args, **options)

    return call


def resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation


def has_shape(annotation: Any) -> bool:
    if isinstance(annotation, list | tuple):
        return any(map(has_shape, annotation))
    is_array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or any(map(has_shape, get_args(annotation)))
