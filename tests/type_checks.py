"""Checks of types and shapes at every call of a module's functions, installed before the modules are imported.

jaxtyping's decorator costs some 50 µs a call, as it keeps the sizes of all axes. A function without a shape in its
annotations gets beartype's decorator instead, which checks its types in about 1 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype

check_shapes = jaxtyping.jaxtyped


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
    if not isinstance(target, FunctionType) or not check_types_alone(target):
        return check_shapes(target, typechecker=typechecker)
    return beartype(target)


def check_types_alone(function: Callable[..., Any]) -> bool:
    """Resolve the annotations of a function; whether all are known already and none of them has a shape."""
    try:
        known = {name: resolve(value, function) for name, value in function.__annotations__.items()}
    except NameError:  # imported for the type checker only, or defined below
        return False
    if any(map(has_shape, known.values())):
        return False
    function.__annotations__ = known
    return True


def resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    return eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation


def has_shape(annotation: Any) -> bool:
    if isinstance(annotation, list | tuple):
        return any(map(has_shape, annotation))
    is_array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or any(map(has_shape, get_args(annotation)))
