"""Checks of types and shapes at every call of a module's functions, installed before the modules are imported.

beartype checks the types in about 1 µs a call. A function with a shape in its annotations also gets a scope of
jaxtyping, in which an axis name has one size; jaxtyping's own decorator checks the same, but every argument twice and
at 50 µs a call. A function is decorated when it is first called: most tests call few of all functions, and names that
are defined below a function are known by then. A function inside a function is a new one at each call of the outer one;
its decoration, which takes 1 ms, is shared by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from inspect import isgeneratorfunction, unwrap
from threading import local
from types import CodeType, FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype

check_shapes = jaxtyping.jaxtyped
AXES = check_shapes("context")  # while it is entered, an axis name has one size
is_active = True
decorations: dict[CodeType, Callable[..., Any]] = {}
target = local()


@contextmanager
def unchecked() -> Iterator[None]:
    """Check nothing meanwhile: for mistakes that the package itself must refuse."""
    global is_active
    is_active = False
    try:
        yield
    finally:
        is_active = True


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
        if not is_active:
            return function(*args, **options)
        if checked is None:
            is_local = "<locals>" in function.__qualname__ and not isgeneratorfunction(function)
            checked = share_decoration(function, typechecker) if is_local else decorate(function, typechecker)
        return checked(*args, **options)

    return call


def share_decoration(function: Callable[..., Any], typechecker: Any) -> Callable[..., Any]:
    """Decorate a function that calls `target.function`, once for all functions of this code, and set that before."""
    if function.__code__ not in decorations:

        @wraps(function)  # so it has the annotations
        def run_target(*args: Any, **options: Any) -> Any:
            return target.function(*args, **options)

        decorations[function.__code__] = decorate(run_target, typechecker)
    checked = decorations[function.__code__]

    def call(*args: Any, **options: Any) -> Any:
        target.function = function
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
    return eval(annotation, unwrap(function).__globals__) if isinstance(annotation, str) else annotation


def has_shape(annotation: Any) -> bool:
    if isinstance(annotation, list | tuple):
        return any(map(has_shape, annotation))
    is_array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or any(map(has_shape, get_args(annotation)))
