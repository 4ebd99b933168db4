"""Detectors: which keys are anchors. Each names its scale, and says so when it cannot fire.

    detect(trace, "zscore")                        # bool [step, layer, key]
    detect(trace, "rulli(eps=3, scale='lift')")
    detect(trace, "topk(k=5)")

| detector | an anchor is |
|---|---|
| `zscore(k=3, scale="lift")` | above mean + k standard deviations of the eligible keys |
| `rulli(eps=3, scale="lift")` | above the mean of the other keys + eps |
| `gu(eps=0.3)` | given more than eps by the average row that sees it |
| `topk(k=5)` | one of the k keys of largest lift |
| `soft(k=2, alpha=5)` | likelier than not by a sigmoid, over the sum of all layers, heads and rows |
| `af_absorption` | the largest key; of an autoregressive model the first: what a published script does |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from floatscope.analysis.kept import kept
from floatscope.errors import UserError, unknown_choice
from floatscope.syntax import merge_arguments, parse_call
from floatscope.traces import Trace
from floatscope.traces.trace import SCALES

FLAT = 1e-4
"""Keys that differ by less than this share of their mean differ by rounding: there is nothing to detect."""

MOST = {"mean": 1.0, "visible": 1.0, "percent": 100.0}
"""No key exceeds this on scales that have a bound of their own."""

Found = Bool[np.ndarray, "step layer key"]
Values = Float[np.ndarray, "step layer key"]


@dataclass(frozen=True)
class Detector:
    name: str
    given: Mapping[str, Any]

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"{self.name}({said})" if said else self.name

    @property
    def scale(self) -> str:
        """What it looks at."""
        return str(self.given.get("scale", RULES[self.name].scale))


@dataclass(frozen=True)
class Rule:
    scale: str
    defaults: Mapping[str, Any]
    find: Callable[[Trace, Mapping[str, Any]], Found]


def detector(text: str | Detector) -> Detector:
    """A detector as people write it, with its arguments filled in."""
    if isinstance(text, Detector):
        return text
    name, given = parse_call(text, "zscore(k=3)")
    if name not in RULES:
        raise unknown_choice("detector", name, RULES)
    filled = merge_arguments("detector", name, given, RULES[name].defaults)
    chosen = Detector(name, filled)
    _check(chosen)
    return chosen


def _check(by: Detector) -> None:
    """Refuse what could fire on no trace at all."""
    if "scale" in by.given and by.given["scale"] not in SCALES:
        raise unknown_choice("scale", str(by.given["scale"]), SCALES)
    if "k" in by.given and by.given["k"] <= 0:
        raise UserError(f"{by.name} takes a k above 0, got {by.given['k']:g}")
    if "eps" in by.given and by.given["eps"] < 0:
        raise UserError(f"{by.name} takes an eps of at least 0, got {by.given['eps']:g}")
    if by.name == "gu" and by.given["eps"] >= 1:
        raise UserError(f"gu(eps={by.given['eps']:g}) cannot fire: no row gives a key more than 1; use a smaller eps")
    if by.name == "rulli" and by.scale in MOST:
        refuse_eps(by.given["eps"], by.scale)


def detect(trace: Trace, by: str | Detector = "zscore") -> Found:
    """The anchors of every step and layer, of the mean over heads. One that cannot fire here is refused."""
    chosen = detector(by)
    return RULES[chosen.name].find(trace, chosen.given)


def highest_z(keys: int) -> float:
    """No z-score of so many numbers is larger."""
    return math.sqrt(max(0, keys - 1))


def z_threshold(k: float, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """mean + k·std; infinite where the keys are all alike."""
    return np.where(std <= FLAT * np.abs(mean), np.inf, mean + k * std)


def refuse_k(k: float, keys: int, name: str = "zscore") -> None:
    if k >= highest_z(keys):
        raise UserError(
            f"{name}(k={k:g}) cannot fire on {keys} keys, where no z-score exceeds √{max(0, keys - 1)} ="
            f" {highest_z(keys):.2f}; use a smaller k, or longer texts"
        )


def refuse_eps(eps: float, scale: str, keys: int = 0) -> None:
    most = MOST.get(scale, float(keys))
    if eps >= most:
        raise UserError(
            f"rulli(eps={eps:g}) cannot fire on the scale '{scale}', where no key exceeds {most:g}; use a smaller eps"
        )


def _zscore(trace: Trace, given: Mapping[str, Any]) -> Found:
    values = trace.by_layer(scale=given["scale"], eligible=True)
    refuse_k(given["k"], int(np.isfinite(values).sum(-1).max(initial=0)))
    mean, std = _moments(values)
    return values > z_threshold(given["k"], mean, std)


def _rulli(trace: Trace, given: Mapping[str, Any]) -> Found:
    values = trace.by_layer(scale=given["scale"], eligible=True)
    n = np.isfinite(values).sum(-1, keepdims=True)
    refuse_eps(given["eps"], given["scale"], int(trace.arrays["keys"].max(initial=0)))
    with np.errstate(divide="ignore", invalid="ignore"):
        others = (np.nansum(values, -1, keepdims=True) - values) / (n - 1)
        return values > others + given["eps"]


def _gu(trace: Trace, given: Mapping[str, Any]) -> Found:
    return trace.by_layer(scale="visible", eligible=True) > given["eps"]


def _topk(trace: Trace, given: Mapping[str, Any]) -> Found:
    lift = trace.by_layer(scale="lift", eligible=True)
    ranked = np.where(np.isnan(lift), -np.inf, lift)
    order = np.argsort(-ranked, axis=-1, kind="stable")[..., : given["k"]]
    found = np.zeros(lift.shape, bool)
    np.put_along_axis(found, order, True, axis=-1)
    return found & np.isfinite(lift)


def _soft(trace: Trace, given: Mapping[str, Any]) -> Found:
    weight = soft_weights(trace, given["k"], given["alpha"]) > 0.5
    return np.repeat(weight[:, None], len(trace.arrays["layers"]), axis=1)


def soft_weights(trace: Trace, k: float = 2.0, alpha: float = 5.0) -> Float[np.ndarray, "step key"]:
    """sigmoid(alpha · (m − (mean + k·std))), m what a key receives from all layers, heads and rows together."""
    heads = kept(trace, "head_stats").shape[2]
    each = trace.by_layer(scale="mean", eligible=True).astype(np.float64)
    m = each.sum(1, keepdims=True) * heads * trace.arrays["keys"][:, None, None]
    refuse_k(k, int(np.isfinite(m).sum(-1).max(initial=0)), "soft")
    mean, std = _moments(m)
    with np.errstate(over="ignore"):
        weights: np.ndarray = 1 / (1 + np.exp(-alpha * (m - z_threshold(k, mean, std))))
    return np.nan_to_num(weights[:, 0])


def _af_absorption(trace: Trace, given: Mapping[str, Any]) -> Found:
    received = trace.by_layer(scale="mean")
    ranked = np.where(np.isnan(received), -np.inf, received)
    top = np.zeros(ranked.shape[:2], int) if trace.meta.get("family") == "arm" else ranked.argmax(-1)
    return (np.arange(received.shape[-1]) == top[..., None]) & np.isfinite(received)


def _moments(values: Values) -> tuple[np.ndarray, np.ndarray]:
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
