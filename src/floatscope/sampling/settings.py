"""How a canvas is filled: every setting in one frozen value, checked once, written into the run.

    how = resolve_sampling("mdm", sampler="threshold(tau=0.95)", new_tokens=64, block=32)
    how = resolve_sampling("mdm", preset="dream", sampler="entropy", new_tokens=64, steps=64)

Presets are the official defaults of a model's authors. Whatever is given beside a preset replaces that part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.sampling.samplers import SAMPLERS, token_counts, top
from floatscope.syntax import merge_arguments, parse_call

SCHEDULES = ("even", "time")
JUDGED = ("model", "drawn")
EOS = ("free", "never", "last")
MOST = 10**6
TEMPERATURES = (1e-6, 1e6)  # beyond these fp32 has no more to say; 0 is the most likely token


@dataclass(frozen=True)
class Sampling:
    """All there is to say about decoding. `resolve_sampling()` makes one; the defaults are those of no preset."""

    sampler: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    new_tokens: int = 32
    steps: int | None = None  # None: a step per masked position
    block: int | None = None  # None: one block
    schedule: str = "even"  # even: ⌊M/steps⌋ a step, the first M mod steps one more | time: int(M(1 − t'/t)), then all
    eps: float = 1e-3  # where the time of `time` and of `origin` ends
    temperature: float = 0.0  # of the token; 0: the most likely
    top_p: float | None = None
    top_k: int | None = None
    judged: str = "model"  # what a confidence is read from: the model's own distribution | the one drawn from
    order_temperature: float = 0.0  # of the order: 0: the best first (Dream's alg_temp)
    guidance: float = 0.0  # classifier-free guidance w: u + (w + 1)(c − u)
    eos: str = "free"  # free | never (eos has no probability) | last (ends of text and turn: no confidence)
    stop: bool = False  # a sample ends when an end token stands with no mask before it
    seed: int = 0

    @property
    def blocks(self) -> int:
        return self.new_tokens // self.block if self.block else 1

    @property
    def paced(self) -> bool:
        """Whether the schedule says how many steps there are."""
        return self.sampler in SAMPLERS and SAMPLERS[self.sampler].pace == "schedule"

    @property
    def as_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"arguments": dict(self.arguments)}


PRESETS: dict[str, dict[str, Any]] = {
    "llada": {"sampler": "confidence", "new_tokens": 128},  # one block, a step per token, temperature 0
    "dream": {"sampler": "origin", "new_tokens": 512, "steps": 512, "schedule": "time", "judged": "drawn"},
}


def resolve_sampling(paradigm: str, preset: str | None = None, **given: Any) -> Sampling:
    """The settings for a model of this family: its defaults, then the preset's, then what is given."""
    allowed = [f.name for f in fields(Sampling) if f.name != "arguments"]
    for name in given:
        if name not in allowed:
            raise unknown_choice("setting of decode", name, allowed)
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise unknown_choice("preset", str(preset), PRESETS)
    if paradigm == "arm" and preset is not None:
        raise UserError(f"preset '{preset}' is for masked diffusion models, and this is an autoregressive one")
    start = {"sampler": "ar", "stop": True} if paradigm == "arm" else {"sampler": "confidence"}
    wanted = {**start, **PRESETS.get(preset or "", {}), **{k: v for k, v in given.items() if v is not None}}
    name, own = parse_call(str(wanted.pop("sampler")))
    if name not in ("ar", *SAMPLERS):
        raise unknown_choice("sampler", name, ("ar", *SAMPLERS))
    if (name == "ar") != (paradigm == "arm"):
        kind = "an autoregressive model, which takes 'ar'" if paradigm == "arm" else "a masked diffusion model"
        takes = "" if paradigm == "arm" else f", which takes {', '.join(SAMPLERS)}"
        raise UserError(f"sampler '{name}' is not for {kind}{takes}")
    if name in SAMPLERS and SAMPLERS[name].pace == "own" and given.get("steps") is None:
        wanted.pop("steps", None)  # a preset's: this sampler finds its own
    defaults = {} if name == "ar" else {**SAMPLERS[name].arguments, **SAMPLERS[name].scored_by}
    how = Sampling(sampler=name, arguments=merge_arguments("sampler", name, own, defaults), **wanted)
    _check(how, preset)
    return how


def _check(how: Sampling, preset: str | None) -> None:
    least = {"new_tokens": 0, "steps": 1, "block": 1, "top_k": 1, "seed": None}
    for name, low in least.items():
        value = getattr(how, name)
        if value is None and name in ("steps", "block", "top_k"):
            continue
        if isinstance(value, int) and value > MOST and name != "seed":
            raise UserError(f"{name} must be at most {MOST:,}, got {value}")
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            raise UserError(
                f"{name} must be a whole number{f' of at least {low}' if low is not None else ''}, got {value!r}"
            )
    for name, most in {"temperature": None, "order_temperature": None, "guidance": None, "eps": 1, "top_p": 1}.items():
        value = getattr(how, name)
        if name == "top_p" and value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf") or (most is not None and not 0 < value <= most):
            span = f"more than 0 and at most {most}" if most else "0 or more"
            raise UserError(f"{name} must be {span}, got {value!r}")
    for name in ("temperature", "order_temperature"):
        value = getattr(how, name)
        if value and not TEMPERATURES[0] <= value <= TEMPERATURES[1]:
            raise UserError(f"{name} must be 0, or from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}, got {value}")
    for name, words in {"schedule": SCHEDULES, "judged": JUDGED, "eos": EOS}.items():
        if getattr(how, name) not in words:
            raise unknown_choice(name, str(getattr(how, name)), words)
    if not isinstance(how.stop, bool):
        raise UserError(f"stop must be True or False, got {how.stop!r}")
    if how.sampler == "ar":
        _check_ar(how)
        return
    if how.order_temperature and SAMPLERS[how.sampler].pick is not top:
        raise UserError(f"order_temperature draws the order of samplers that rank; '{how.sampler}' does not")
    if not 1 <= how.arguments.get("history", 1) <= 100:
        raise UserError(f"sampler '{how.sampler}' looks back 1 to 100 steps, got history={how.arguments['history']}")
    if "background" in how.arguments:
        token_counts(how.arguments["background"])
    _check_blocks(how)


def _check_ar(how: Sampling) -> None:
    default = Sampling("ar")
    for name in ("steps", "block", "schedule", "guidance", "order_temperature"):
        if getattr(how, name) != getattr(default, name):
            raise UserError(f"{name} means nothing to 'ar', which generates one token a step; leave it out")
    if how.new_tokens < 1:
        raise UserError("an autoregressive model only appends: new_tokens must be at least 1")


def _check_blocks(how: Sampling) -> None:
    if how.block is not None:
        if how.block > how.new_tokens:
            raise UserError(
                f"a block of {how.block} is longer than the {how.new_tokens} new tokens; give a shorter one"
            )
        if how.new_tokens % how.block:
            fits = [n for n in range(1, how.new_tokens + 1) if how.new_tokens % n == 0]
            near = min(fits, key=lambda n: abs(n - how.block))  # type: ignore[operator]
            raise UserError(f"{how.new_tokens} new tokens do not divide into blocks of {how.block}; {near} would do")
    if how.steps is None:
        return
    if SAMPLERS[how.sampler].pace == "own":
        raise UserError(f"sampler '{how.sampler}' decides by itself how many steps it takes; leave `steps` out")
    if how.steps % how.blocks:
        raise UserError(
            f"{how.steps} steps do not divide among {how.blocks} blocks; give a multiple of {how.blocks},"
            f" such as {max(1, round(how.steps / how.blocks)) * how.blocks}"
        )
