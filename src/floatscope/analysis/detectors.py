"""Detectors: which keys are anchors. A detector that cannot fire on a trace is refused with the reason.

    detect(trace, "zscore")                        # bool [step, layer, key]
    detect(trace, "rulli(eps=3, scale='lift')")
    detect(trace, "topk(k=5)")

| detector | an anchor is a key … |
|---|---|
| `zscore(k=3, scale="lift")` | above mean + k standard deviations of the eligible keys |
| `rulli(eps=3, scale="lift")` | above the mean of the other keys + eps |
| `gu(eps=0.3)` | that receives more than eps from the average row that sees it |
| `topk(k=5)` | among the k keys of largest lift |
| `soft(k=2, alpha=5)` | with a sigmoid weight above ½, over the sum of all layers, heads and rows |
| `af_absorption` | that is the largest; of an ARM the first: the rule of a published script |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from floatscope.errors import UserError, unknown_choice
from floatscope.schema import Paradigm
from floatscope.syntax import merge_arguments, parse_call
from floatscope.traces import Trace
from floatscope.traces.trace import SCALES

FLAT_TOLERANCE = 1e-4
"""Keys that differ by less than this share of their mean differ by rounding, so there is nothing to detect."""

SCALE_LIMITS = {"mean": 1.0, "visible": 1.0, "percent": 100.0}
"""No key exceeds this, on the scales with a bound of their own."""

KeyMask = Bool[np.ndarray, "step layer key"]
Values = Float[np.ndarray, "step layer key"]


@dataclass(frozen=True)
class Detector:
    """A detector with all its arguments; `str()` gives the call that `parse_detector` reads."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})" if arguments else self.name

    @property
    def scale(self) -> str:
        """The scale of the values that the detector compares."""
        return str(self.arguments.get("scale", RULES[self.name].scale))


@dataclass(frozen=True)
class Rule:
    """A row of the table of detectors: its scale, the defaults of its arguments, and the function that finds keys."""

    scale: str
    defaults: Mapping[str, Any]
    find: Callable[[Trace, Mapping[str, Any]], KeyMask]


def parse_detector(text: str | Detector) -> Detector:
    """Return the detector that a call such as `"zscore(k=3)"` names, with all its arguments."""
    if isinstance(text, Detector):
        return text
    name, arguments = parse_call(text, "zscore(k=3)")
    if name not in RULES:
        raise unknown_choice("detector", name, RULES)
    detector = Detector(name, merge_arguments("detector", name, arguments, RULES[name].defaults))
    _check_arguments(detector)
    return detector


def detect(trace: Trace, detector: str | Detector = "zscore") -> KeyMask:
    """Return the anchors of every step and layer, on the mean over heads; refuse a detector that cannot fire here."""
    parsed = parse_detector(detector)
    return RULES[parsed.name].find(trace, parsed.arguments)


def max_zscore(keys: int) -> float:
    """Return the largest z-score that is possible among this number of values."""
    return math.sqrt(max(0, keys - 1))


def z_threshold(k: float, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return mean + k·std; infinity where the values are equal up to rounding."""
    return np.where(std <= FLAT_TOLERANCE * np.abs(mean), np.inf, mean + k * std)


def check_k(k: float, keys: int, name: str = "zscore") -> None:
    """Refuse a k that no z-score of this number of keys exceeds."""
    if k >= max_zscore(keys):
        raise UserError(
            f"{name}(k={k:g}) cannot fire on {keys} keys, where no z-score exceeds √{max(0, keys - 1)} ="
            f" {max_zscore(keys):.2f}; use a smaller k, or longer texts"
        )


def check_eps(eps: float, scale: str, keys: int = 0) -> None:
    """Refuse an eps that no key exceeds on this scale; `keys` bounds the scales sum and lift."""
    limit = SCALE_LIMITS.get(scale, float(keys))
    if eps >= limit:
        raise UserError(
            f"rulli(eps={eps:g}) cannot fire on the scale '{scale}', where no key exceeds {limit:g}; use a smaller eps"
        )


def _check_arguments(detector: Detector) -> None:
    """Refuse what cannot fire on any trace."""
    name, arguments = detector.name, detector.arguments
    if "scale" in arguments and arguments["scale"] not in SCALES:
        raise unknown_choice("scale", str(arguments["scale"]), SCALES)
    if "k" in arguments and arguments["k"] <= 0:
        raise UserError(f"{name} takes a k above 0, got {arguments['k']:g}")
    if "eps" in arguments and arguments["eps"] < 0:
        raise UserError(f"{name} takes an eps of at least 0, got {arguments['eps']:g}")
    if name == "gu" and arguments["eps"] >= 1:
        raise UserError(f"gu(eps={arguments['eps']:g}) cannot fire: no row gives a key more than 1; use a smaller eps")
    if name == "rulli" and detector.scale in SCALE_LIMITS:
        check_eps(arguments["eps"], detector.scale)


def _zscore(trace: Trace, arguments: Mapping[str, Any]) -> KeyMask:
    values = trace.received(scale=arguments["scale"], eligible=True)
    check_k(arguments["k"], int(np.isfinite(values).sum(-1).max(initial=0)))
    mean, std = _moments(values)
    return values > z_threshold(arguments["k"], mean, std)


def _rulli(trace: Trace, arguments: Mapping[str, Any]) -> KeyMask:
    values = trace.received(scale=arguments["scale"], eligible=True)
    n = np.isfinite(values).sum(-1, keepdims=True)
    check_eps(arguments["eps"], arguments["scale"], int(trace.arrays["keys"].max(initial=0)))
    with np.errstate(divide="ignore", invalid="ignore"):
        others = (np.nansum(values, -1, keepdims=True) - values) / (n - 1)
        return values > others + arguments["eps"]


def _gu(trace: Trace, arguments: Mapping[str, Any]) -> KeyMask:
    return trace.received(scale="visible", eligible=True) > arguments["eps"]


def _topk(trace: Trace, arguments: Mapping[str, Any]) -> KeyMask:
    lift = trace.received(scale="lift", eligible=True)
    ranked = np.where(np.isnan(lift), -np.inf, lift)
    order = np.argsort(-ranked, axis=-1, kind="stable")[..., : arguments["k"]]
    is_top = np.zeros(lift.shape, bool)
    np.put_along_axis(is_top, order, True, axis=-1)
    return is_top & np.isfinite(lift)


def _soft(trace: Trace, arguments: Mapping[str, Any]) -> KeyMask:
    is_anchor = soft_weights(trace, arguments["k"], arguments["alpha"]) > 0.5
    return np.repeat(is_anchor[:, None], len(trace.arrays["layers"]), axis=1)


def soft_weights(trace: Trace, k: float = 2.0, alpha: float = 5.0) -> Float[np.ndarray, "step key"]:
    """Return sigmoid(alpha · (m − (mean + k·std))), with m what a key receives from all layers, heads and rows."""
    heads = trace.require("head_stats").shape[2]
    received = trace.received(scale="mean", eligible=True).astype(np.float64)
    m = received.sum(1, keepdims=True) * heads * trace.arrays["keys"][:, None, None]
    check_k(k, int(np.isfinite(m).sum(-1).max(initial=0)), "soft")
    mean, std = _moments(m)
    with np.errstate(over="ignore"):
        weights: np.ndarray = 1 / (1 + np.exp(-alpha * (m - z_threshold(k, mean, std))))
    return np.nan_to_num(weights[:, 0])


def _af_absorption(trace: Trace, arguments: Mapping[str, Any]) -> KeyMask:
    received = trace.received(scale="mean")
    ranked = np.where(np.isnan(received), -np.inf, received)
    top = np.zeros(ranked.shape[:2], int) if trace.meta.get("paradigm") == Paradigm.ARM else ranked.argmax(-1)
    return (np.arange(received.shape[-1]) == top[..., None]) & np.isfinite(received)


def _moments(values: Values) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over the keys that have a value."""
    n = np.isfinite(values).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.nansum(values, -1, keepdims=True) / n
        return mean, np.sqrt(np.nansum((values - mean) ** 2, -1, keepdims=True) / n)


RULES = {
    "zscore": Rule("lift", {"k": 3.0, "scale": "lift"}, _zscore),
    "rulli": Rule("lift", {"eps": 3.0, "scale": "lift"}, _rulli),
    "gu": Rule("visible", {"eps": 0.3}, _gu),
    "topk": Rule("lift", {"k": 5}, _topk),
    "soft": Rule("sum over layers, heads and rows", {"k": 2.0, "alpha": 5.0}, _soft),
    "af_absorption": Rule("mean", {}, _af_absorption),
}
