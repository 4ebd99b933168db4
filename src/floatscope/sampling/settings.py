"""The settings of decoding in one frozen value, checked once and written into every run.

    sampling = resolve_sampling(Paradigm.MDM, sampler="threshold(tau=0.95)", new_tokens=64, block=32)
    sampling = resolve_sampling(Paradigm.MDM, preset="dream", sampler="entropy", new_tokens=64, steps=64)

A preset holds the official defaults of a model's authors. A setting given beside a preset replaces that part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from floatscope.errors import UserError, unknown_choice
from floatscope.sampling.samplers import SAMPLERS, load_token_counts, select_top
from floatscope.schema import Paradigm
from floatscope.syntax import format_call, merge_arguments, parse_call

SCHEDULES = ("even", "time")
CONFIDENCE_SOURCES = ("model", "drawn")
EOS_RULES = ("free", "never", "last")
RENOISING_ARGUMENTS = {
    "entropy_bound": 0.1,
    "t_max": 0.8,
    "t_min": 0.4,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}
"""Of `renoise`, the sampler of models without a mask token; names and values are those of DiffusionGemma."""
RENOISING_STEPS = 48
SAMPLER_NAMES = ("ar", *SAMPLERS, "renoise")
MAX_COUNT = 10**6
MAX_HISTORY = 100
TEMPERATURE_RANGE = (1e-6, 1e6)  # what fp32 can resolve; 0 means the most likely token


@dataclass(frozen=True)
class Sampling:
    """All settings of decoding. The defaults are those without a preset.

    They are checked when a model decodes with them, because what is allowed depends on its paradigm.

    Example:
        sampling = fs.Sampling("threshold(tau=0.6)", new_tokens=16, block=8)
        fs.decode(fs.load("twin:mdm"), "Where does Mira live?", sampling=sampling).text
    """

    sampler: str  # as people write it, "threshold(tau=0.6)"; once resolved, its name alone
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the sampler, once resolved
    new_tokens: int = 32
    steps: int | None = None  # None: one per masked position; of each block, or canvas, if the model has such
    block: int | None = None  # the block length; None: one block, or the blocks of the model's attention
    schedule: str = "even"  # even: ⌊M/steps⌋ a step, the first M mod steps one more | time: int(M(1 − t'/t)), then all
    eps: float = 1e-3  # where the time of `time` and of `origin` ends
    temperature: float = 0.0  # of the token; 0: the most likely
    top_p: float | None = None
    top_k: int | None = None
    confidence_from: str = "model"  # model: the model's own distribution | drawn: after temperature and filters
    order_temperature: float = 0.0  # of the order; 0: the best first (Dream's alg_temp)
    guidance: float = 0.0  # classifier-free guidance w: u + (w + 1)(c − u)
    eos: str = "free"  # free | never (eos has no probability) | last (end tokens have no confidence)
    stop: bool = False  # a sample ends when an end token is committed with no mask before it
    seed: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return self.new_tokens // self.block if self.block else 1

    @property
    def is_scheduled(self) -> bool:
        """Whether the schedule alone decides the number of steps."""
        return self.sampler in SAMPLERS and SAMPLERS[self.sampler].pace == "schedule"

    @property
    def as_json(self) -> dict[str, Any]:
        """The settings as a plain dict; `Sampling(**sampling.as_json)` is equal to `sampling`."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"arguments": dict(self.arguments)}


PRESETS: dict[str, dict[str, Any]] = {
    "llada": {"sampler": "confidence", "new_tokens": 128},  # one block, one step per token, temperature 0
    "dream": {"sampler": "origin", "new_tokens": 512, "steps": 512, "schedule": "time", "confidence_from": "drawn"},
}
BLOCK_PRESETS: dict[str, dict[str, Any]] = {
    name: {"confidence_from": "drawn", "stop": True, **settings}
    for name, settings in {
        "llada2": {"sampler": "dynamic(tau=0.95)", "new_tokens": 2048},
        "llada2.1": {"sampler": "dynamic(tau=0.95, editing=0.9)", "new_tokens": 2048},
        "sdar": {"sampler": "dynamic(tau=0.85)", "new_tokens": 128, "temperature": 1.0},
        "fast-dllm-v2": {"sampler": "threshold(tau=0.95)", "new_tokens": 2048, "block": 8},
    }.items()
}
"""Presets of models that attend in blocks. Blocks are the model's own, with one step per position."""
CANVAS_PRESETS: dict[str, dict[str, Any]] = {
    "diffusion-gemma": {
        "sampler": "renoise",
        "new_tokens": 256,
        "steps": RENOISING_STEPS,
        "confidence_from": "drawn",
        "stop": True,
    },
}
"""Presets of models without a mask token, which denoise one canvas after another."""


def resolve_sampling(
    paradigm: Paradigm,
    preset: str | None = None,
    *,
    sampling: Sampling | None = None,
    block_size: int | None = None,
    canvas_size: int | None = None,
    **settings: Any,
) -> Sampling:
    """Build and check the settings: the defaults of the paradigm, then the preset or `sampling`, then `settings`.

    Args:
        paradigm: how the model decodes.
        preset: a name of `PRESETS`, for masked diffusion models; of `BLOCK_PRESETS` if the model attends in blocks, of
            `CANVAS_PRESETS` if it has no mask token.
        sampling: all settings as one value, instead of a preset.
        block_size: of a model that attends in blocks; None: it does not.
        canvas_size: of a model without a mask token; None: it has one, or is autoregressive.
        **settings: fields of `Sampling` (except `arguments`); None counts as not given. `sampler` is written with its
            arguments, as in "threshold(tau=0.95)".
    """
    allowed = [f.name for f in fields(Sampling) if f.name != "arguments"]
    for name in settings:
        if name not in allowed:
            raise unknown_choice("setting of decode", name, allowed)
    presets = CANVAS_PRESETS if canvas_size is not None else PRESETS if block_size is None else BLOCK_PRESETS
    if preset is not None:
        _check_preset(preset, paradigm, block_size, canvas_size)
    defaults: dict[str, Any] = {"sampler": "confidence"}
    if paradigm is Paradigm.ARM:
        defaults = {"sampler": "ar", "stop": True}
    elif canvas_size is not None:
        defaults = {"sampler": "renoise", "stop": True}
    overrides = {name: value for name, value in settings.items() if value is not None}
    values = {**defaults, **presets.get(preset or "", {}), **_as_settings(sampling, preset), **overrides}
    if paradigm is Paradigm.ARM and values.get("steps") == values.get("new_tokens", Sampling.new_tokens):
        values.pop("steps", None)  # one step per token, as an ARM takes anyway
    name, arguments = parse_call(str(values.pop("sampler")))
    _check_sampler_name(name, paradigm, canvas_size)
    if name == "renoise" and values.get("steps") is None:
        values["steps"] = RENOISING_STEPS
    if preset is not None and name in SAMPLERS and SAMPLERS[name].pace == "adaptive" and settings.get("steps") is None:
        values.pop("steps", None)  # from a preset: this sampler decides its own
    own_arguments: dict[str, dict[str, Any]] = {"ar": {}, "renoise": RENOISING_ARGUMENTS}
    default_arguments = own_arguments[name] if name in own_arguments else SAMPLERS[name].arguments
    arguments = merge_arguments("sampler", name, arguments, default_arguments)
    resolved = Sampling(sampler=name, arguments=arguments, **values)
    _check_sampling(resolved, block_size)
    return resolved


def _check_sampler_name(name: str, paradigm: Paradigm, canvas_size: int | None) -> None:
    if name not in SAMPLER_NAMES:
        raise unknown_choice("sampler", name, SAMPLER_NAMES)
    takes: tuple[str, ...]
    if paradigm is Paradigm.ARM:
        kind, takes = "an autoregressive model", ("ar",)
    elif canvas_size is not None:
        kind, takes = "a model without a mask token", ("renoise",)
    else:
        kind, takes = "a masked diffusion model", tuple(SAMPLERS)
    if name not in takes:
        listed = f"'{takes[0]}'" if len(takes) == 1 else ", ".join(takes)
        raise UserError(f"sampler '{name}' is not for {kind}, which takes {listed}")


def _check_preset(preset: Any, paradigm: Paradigm, block_size: int | None, canvas_size: int | None) -> None:
    every = {**PRESETS, **BLOCK_PRESETS, **CANVAS_PRESETS}
    if not isinstance(preset, str) or preset not in every:
        raise unknown_choice("preset", str(preset), every)
    if paradigm is Paradigm.ARM:
        raise UserError(f"preset '{preset}' is for masked diffusion models, and this is an autoregressive model")
    if (canvas_size is None) == (preset in CANVAS_PRESETS):
        own = CANVAS_PRESETS if canvas_size is not None else PRESETS if block_size is None else BLOCK_PRESETS
        has = ("without", "has one") if canvas_size is None else ("with", "has none")
        raise UserError(
            f"preset '{preset}' is for models {has[0]} a mask token, and this one {has[1]}; use {' or '.join(own)}"
        )
    if block_size is None and preset in BLOCK_PRESETS:
        raise UserError(
            f"preset '{preset}' is for models that attend in blocks, and this one attends to all positions; use"
            f" {' or '.join(PRESETS)}"
        )
    if block_size is not None and preset in PRESETS:
        raise UserError(
            f"preset '{preset}' is for models that attend to all positions, and this one attends in blocks of"
            f" {block_size}; use one of {', '.join(BLOCK_PRESETS)}"
        )


def _as_settings(sampling: Sampling | None, preset: str | None) -> dict[str, Any]:
    """The fields of `sampling` as keyword arguments of `resolve_sampling`."""
    if sampling is None:
        return {}
    if not isinstance(sampling, Sampling):
        raise UserError(f"sampling must be a fs.Sampling(…) or None, got {sampling!r}")
    if preset is not None:
        raise UserError(f"sampling holds all settings, and so does preset '{preset}'; leave one of them out")
    values = {name: value for name, value in sampling.as_json.items() if name != "arguments"}
    return values | ({"sampler": format_call(sampling.sampler, sampling.arguments)} if sampling.arguments else {})


def _check_sampling(sampling: Sampling, block_size: int | None) -> None:
    _check_numbers(sampling)
    for name, choices in {"schedule": SCHEDULES, "confidence_from": CONFIDENCE_SOURCES, "eos": EOS_RULES}.items():
        if getattr(sampling, name) not in choices:
            raise unknown_choice(name, str(getattr(sampling, name)), choices)
    if not isinstance(sampling.stop, bool):
        raise UserError(f"stop must be True or False, got {sampling.stop!r}")
    if sampling.sampler == "ar":
        _check_autoregressive(sampling)
        return
    if sampling.sampler == "renoise":
        _check_renoising(sampling)
        return
    name, arguments = sampling.sampler, sampling.arguments
    if sampling.order_temperature and SAMPLERS[name].select is not select_top:
        raise UserError(f"order_temperature needs a sampler that ranks positions, and '{name}' does not; leave it out")
    if not 1 <= arguments.get("history", 1) <= MAX_HISTORY:
        raise UserError(f"history of sampler '{name}' must be 1 to {MAX_HISTORY} steps, got {arguments['history']}")
    if not 0 <= arguments.get("tau", 1) <= 1:
        raise UserError(f"tau of sampler '{name}' is a probability, from 0 to 1, got {arguments['tau']:g}")
    _check_editing(name, arguments)
    if "background" in arguments:
        load_token_counts(arguments["background"])
    if block_size is None:
        _check_blocks(sampling)
    else:
        _check_attention_blocks(sampling, block_size)
    if sampling.steps is not None and SAMPLERS[name].pace == "adaptive":
        raise UserError(f"sampler '{name}' decides its own number of steps; leave `steps` out")


def _check_editing(name: str, arguments: Mapping[str, Any]) -> None:
    editing = arguments.get("editing")
    is_number = isinstance(editing, int | float) and not isinstance(editing, bool)
    if editing is not None and not (is_number and 0 <= editing <= 1):
        raise UserError(
            f"editing of sampler '{name}' is a probability, from 0 to 1, or None for no token editing, got {editing!r}"
        )
    if not 0 <= arguments.get("extra_steps", 0) <= MAX_COUNT:
        raise UserError(f"extra_steps of sampler '{name}' must be 0 to {MAX_COUNT:,}, got {arguments['extra_steps']}")


def _check_numbers(sampling: Sampling) -> None:
    minimum = {"new_tokens": 0, "steps": 1, "block": 1, "top_k": 1, "seed": None}
    for name, low in minimum.items():
        value = getattr(sampling, name)
        if value is None and name in ("steps", "block", "top_k"):
            continue
        if isinstance(value, int) and value > MAX_COUNT and name != "seed":
            raise UserError(f"{name} must be at most {MAX_COUNT:,}, got {value}")
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            raise UserError(
                f"{name} must be a whole number{f' of at least {low}' if low is not None else ''}, got {value!r}"
            )
    maximum = {"temperature": None, "order_temperature": None, "guidance": None, "eps": 1, "top_p": 1}
    for name, high in maximum.items():
        value = getattr(sampling, name)
        if name == "top_p" and value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf") or (high is not None and not 0 < value <= high):
            span = f"more than 0 and at most {high}" if high else "0 or more"
            raise UserError(f"{name} must be {span}, got {value!r}")
    coldest, hottest = TEMPERATURE_RANGE
    for name in ("temperature", "order_temperature"):
        value = getattr(sampling, name)
        if value and not coldest <= value <= hottest:
            raise UserError(f"{name} must be 0, or from {coldest:g} to {hottest:g}, got {value}")


def _check_autoregressive(sampling: Sampling) -> None:
    default = Sampling("ar")
    for name in ("steps", "block", "schedule", "guidance", "order_temperature"):
        if getattr(sampling, name) != getattr(default, name):
            raise UserError(f"{name} does not apply to 'ar', which generates one token per step; leave it out")
    if sampling.new_tokens < 1:
        raise UserError("an autoregressive model only appends: new_tokens must be at least 1")


def _check_renoising(sampling: Sampling) -> None:
    default = Sampling("renoise")
    for name in ("block", "schedule", "temperature", "top_p", "top_k", "order_temperature", "guidance", "eos"):
        if getattr(sampling, name) != getattr(default, name):
            instead = ": its temperature falls from t_max to t_min" if name == "temperature" else ""
            raise UserError(f"{name} does not apply to 'renoise'{instead}; leave it out")
    if sampling.new_tokens < 1:
        raise UserError(
            "this model fills whole canvases after the prompt: new_tokens must be at least 1, got"
            f" {sampling.new_tokens}"
        )
    for name in ("entropy_bound", "confidence_threshold"):
        value = sampling.arguments[name]
        if not 0 < value < float("inf"):
            raise UserError(f"{name} of sampler 'renoise' is an entropy above 0, got {value:g}")
    t_max, t_min = sampling.arguments["t_max"], sampling.arguments["t_min"]
    coldest, hottest = TEMPERATURE_RANGE
    if not coldest <= t_min <= t_max <= hottest:
        raise UserError(
            f"sampler 'renoise' takes temperatures from {coldest:g} to {hottest:g} with t_min at most t_max, got"
            f" t_min={t_min:g} and t_max={t_max:g}"
        )
    if not 0 <= sampling.arguments["stability_threshold"] <= MAX_HISTORY:
        given = sampling.arguments["stability_threshold"]
        raise UserError(f"stability_threshold of sampler 'renoise' must be 0 to {MAX_HISTORY} steps, got {given}")


def _check_blocks(sampling: Sampling) -> None:
    new_tokens, block, steps = sampling.new_tokens, sampling.block, sampling.steps
    if block is not None:
        if block > new_tokens:
            raise UserError(f"a block of {block} is longer than the {new_tokens} new tokens; give a shorter one")
        if new_tokens % block:
            divisors = [n for n in range(1, new_tokens + 1) if new_tokens % n == 0]
            near = min(divisors, key=lambda n: abs(n - block))
            raise UserError(f"{new_tokens} new tokens do not divide into blocks of {block}; use block={near}")
    if steps is not None and SAMPLERS[sampling.sampler].pace != "adaptive" and steps % sampling.blocks:
        raise UserError(
            f"{steps} steps do not divide among {sampling.blocks} blocks; give a multiple of {sampling.blocks},"
            f" such as {max(1, round(steps / sampling.blocks)) * sampling.blocks}"
        )


def _check_attention_blocks(sampling: Sampling, block_size: int) -> None:
    if sampling.new_tokens < 1:
        raise UserError(
            f"this model fills whole blocks of {block_size} after the prompt: new_tokens must be at least 1, got"
            f" {sampling.new_tokens}"
        )
    if sampling.block is not None and block_size % sampling.block:
        raise UserError(
            f"this model attends in blocks of {block_size}, and blocks of {sampling.block} would cross their borders;"
            f" leave block out, or give a divisor of {block_size}"
        )
