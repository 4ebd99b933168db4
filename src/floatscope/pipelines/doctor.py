"""Checks of this machine: is captured attention the executed attention?

    report = examine()
    report.ok, report.failures

`examine` collects facts (versions, devices, the attention kernels torch chooses) and runs two kinds of checks. *Calls*:
every kind of attention call is drawn at random, run and reduced as in a real watch, and compared with the dense float64
result; the report says which backend ran it. *Models*: tiny models of several kinds run unwatched, then watched with
`verify=True`. Their outputs must agree too, which shows that the mask was read as the model meant it.
"""

from __future__ import annotations

import math
import platform
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from floatscope.capture.attention import AttentionCall
from floatscope.capture.backends import reduce_attention, select_backend, unsupported_reason
from floatscope.capture.edited_attention import attend_with_edits
from floatscope.capture.reduction_spec import ReductionSpec, entropy_row_weights
from floatscope.capture.verify import OUTPUT_TOLERANCE, REDUCTION_TOLERANCE, measure_errors
from floatscope.capture.visibility import Visibility
from floatscope.compat import LibraryUse, choose_sdpa_kernel, list_libraries
from floatscope.errors import UserError
from floatscope.models.device import use_one_thread
from floatscope.pipelines.doctor_models import Trial, build_trials

BATCH, HEADS, DIM, KEYS, CACHED = 3, 4, 32, 128, 119
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PADDINGS = ("none", "left", "right", "holes")
MODEL_FACTOR = 3
"""A model may differ by this many times the limit of one call, because rounding grows through its layers. A mask that
is read wrongly causes a difference of tens of percent."""

BuildMask = Callable[[int, int, Tensor | None, torch.Generator], Visibility]
"""(queries, keys, valid, generator) → a visibility."""
MASKS: dict[str, BuildMask] = {
    "full": lambda Q, K, valid, _: Visibility.full(Q, K, valid),
    "causal": lambda Q, K, valid, _: Visibility.causal(Q, K, valid),
    "window": lambda Q, K, valid, _: Visibility.window(Q, K, 20, valid),
    "block-causal": lambda Q, K, valid, _: Visibility.block(Q, K, 16, valid),
    "boolean": lambda Q, K, valid, generator: Visibility.from_mask(_draw_mask(Q, K, generator), Q, K, valid),
    "additive": lambda Q, K, valid, generator: Visibility.from_mask(_draw_bias(Q, K, generator), Q, K, valid),
    "rule": lambda Q, K, valid, _: Visibility.from_rule(Q, K, _prefix_rule, valid, batch=BATCH),
}


@dataclass(frozen=True)
class Case:
    """One kind of attention call."""

    device: str
    mask: str
    padding: str
    dtype: str
    grouped: bool  # fewer KV heads than query heads
    cached: bool  # fewer queries than keys


@dataclass(frozen=True)
class CallCheck:
    """The result of a case: the backend that ran it, why not triton, and the largest error of each quantity."""

    case: Case
    backend: str
    reason: str | None
    errors: dict[str, float]

    @property
    def limits(self) -> dict[str, float]:
        """The largest error allowed, by quantity."""
        return {quantity: error_limit(quantity, self.case.dtype) for quantity in self.errors}

    @property
    def failed_quantities(self) -> list[str]:
        """The quantities whose error is above the limit, or NaN."""
        return [quantity for quantity, error in self.errors.items() if not error <= self.limits[quantity]]


@dataclass(frozen=True)
class ModelCheck:
    """The result of a trial: the relative norm error of the watched output, and what `verify=True` reported."""

    device: str
    dtype: str
    model: str
    error: float
    limit: float
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the outputs agree and `verify=True` reported nothing."""
        return self.problem is None and self.error <= self.limit


@dataclass(frozen=True)
class BackendUse:
    """Which backend runs the calls with a mask; `where` says which of them, `reason` why it is not triton."""

    device: str
    mask: str
    where: str
    cases: int
    backend: str
    reason: str | None


@dataclass(frozen=True)
class Report:
    """All results of `examine`."""

    facts: dict[str, str]
    calls: list[CallCheck] = field(default_factory=list)
    models: list[ModelCheck] = field(default_factory=list)
    libraries: list[LibraryUse] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """One line for each failed check."""
        calls = [
            f"{describe_case(call.case)}: {quantity} is off by {call.errors[quantity]:.1e}"
            f" (allowed {call.limits[quantity]:.0e})"
            for call in self.calls
            for quantity in call.failed_quantities
        ]
        models = [
            f"{model.model} on {model.device} in {model.dtype}: "
            + (
                model.problem
                or f"watched and unwatched outputs differ by {model.error:.1e} (allowed {model.limit:.0e})"
            )
            for model in self.models
            if not model.ok
        ]
        return calls + models

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.failures

    def largest_errors(self) -> dict[tuple[str, str, str], float]:
        """(device, dtype, quantity) → the largest error over all cases; NaN if any is NaN."""
        errors: dict[tuple[str, str, str], list[float]] = {}
        for call in self.calls:
            for quantity, error in call.errors.items():
                errors.setdefault((call.case.device, call.case.dtype, quantity), []).append(error)
        return {key: math.nan if any(map(math.isnan, values)) else max(values) for key, values in errors.items()}

    def backend_uses(self) -> list[BackendUse]:
        """Which backend runs which cases: one row per mask, more where the backend depends on something else."""
        rows = []
        for device, mask in dict.fromkeys((call.case.device, call.case.mask) for call in self.calls):
            same_mask = [call for call in self.calls if (call.case.device, call.case.mask) == (device, mask)]
            for backend, reason in dict.fromkeys((call.backend, call.reason) for call in same_mask):
                cases = [call.case for call in same_mask if (call.backend, call.reason) == (backend, reason)]
                where = _describe_difference(cases, [call.case for call in same_mask])
                rows.append(BackendUse(device, mask, where, len(cases), backend, reason))
        return rows

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values; NaN becomes null."""
        calls = [{**asdict(call), "limits": call.limits, "ok": not call.failed_quantities} for call in self.calls]
        models = [{**asdict(model), "ok": model.ok} for model in self.models]
        libraries = [{**asdict(library), "problem": library.problem} for library in self.libraries]
        checks = {"calls": calls, "models": models, "libraries": libraries}
        record = {"ok": self.ok, "failures": self.failures, "facts": self.facts, **checks}
        without_nan: dict[str, Any] = _replace_nan(record)
        return without_nan


def examine() -> Report:
    """Run every check, on the CPU and on an accelerator if there is one."""
    facts = collect_facts()
    with use_one_thread():
        calls = [check_case(case) for case in iter_cases()]
        return Report(facts, calls, [check_model(*trial) for trial in iter_trials()], list_libraries())


def list_devices() -> list[str]:
    """The devices to check."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def collect_facts() -> dict[str, str]:
    """Versions, devices and kernels: what a result on this machine may depend on."""
    facts = {"python": platform.python_version()}
    facts |= {name: _installed_version(name) for name in ("torch", "transformers", "triton")}
    facts["cpu"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if "cuda" not in list_devices():
        facts["accelerator"] = "none"
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        facts[f"cuda:{i}"] = f"{properties.name}, capability {properties.major}.{properties.minor}, {memory}"
    for device in list_devices():
        kernels = (f"{_sdpa_kernel(device, dtype)} ({name})" for name, dtype in DTYPES.items())
        facts[f"attention on {device}"] = ", ".join(kernels)
    return facts


def iter_cases() -> Iterator[Case]:
    """Yield every combination of device, mask, padding, dtype, grouped heads and cached keys."""
    for choice in product(list_devices(), MASKS, PADDINGS, DTYPES, (False, True), (False, True)):
        yield Case(*choice)


def check_case(case: Case) -> CallCheck:
    """Run and reduce one random call as a watched forward would, and compare with dense float64."""
    call, spec, carry = draw_call(case)
    result = attend_with_edits(call)
    has_lse = result.lse is not None
    reason = unsupported_reason(call, has_lse)
    errors = measure_errors(call, result.output, spec, carry, reduce_attention(call, result.lse, spec, carry))
    return CallCheck(case, select_backend(call, has_lse), reason, errors)


def error_limit(quantity: str, dtype: str) -> float:
    """The largest error allowed for a quantity in a dtype."""
    return (OUTPUT_TOLERANCE if quantity == "output" else REDUCTION_TOLERANCE)[DTYPES[dtype]]


def describe_case(case: Case) -> str:
    """A case in words: "causal mask, left padding, float32, grouped heads, on cpu"."""
    words = [f"{case.mask} mask", f"{case.padding} padding" if case.padding != "none" else "", case.dtype]
    words += ["grouped heads" if case.grouped else "", "cached keys" if case.cached else "", f"on {case.device}"]
    return ", ".join(word for word in words if word)


def draw_call(case: Case) -> tuple[AttentionCall, ReductionSpec, Tensor]:
    """Draw the call, the rows to add up (all of them, half of them, a single one) and the carry."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    kv, Q, K = HEADS // 2 if case.grouped else HEADS, KEYS - CACHED if case.cached else KEYS, KEYS
    dtype, device = DTYPES[case.dtype], case.device
    q = torch.randn(BATCH, HEADS, Q, DIM, generator=generator).to(device, dtype)
    k, v = torch.randn(2, BATCH, kv, K, DIM, generator=generator).to(device, dtype)
    valid = _draw_padding(case.padding, generator)
    visibility = MASKS[case.mask](Q, K, None if case.padding == "none" else valid.to(device), generator)
    if (mask := visibility.mask) is not None:  # SDPA needs an additive mask in the dtype of the queries
        mask = mask.to(device) if mask.dtype == torch.bool else mask.to(device, dtype)
        visibility = Visibility.from_mask(mask, Q, K, visibility.valid)
    rows = valid[:, K - Q :].to(device)  # [batch, query]
    half = rows & (torch.rand(BATCH, Q, generator=generator) < 0.5).to(device)
    single = F.one_hot(rows.int().argmax(-1), Q).bool() & rows
    weights = torch.stack([rows, half, single], -1).float()
    entropy_weights = entropy_row_weights(rows, visibility.count_visible_keys(device).mean(1).expand(BATCH, -1))
    carry = torch.rand(BATCH, K, 3, generator=generator).to(device)
    return AttentionCall(q, k, v, visibility, 0.2), ReductionSpec(weights, entropy_weights), carry


def iter_trials() -> Iterator[tuple[str, str, Trial]]:
    """Yield (device, dtype, trial): float32 on the CPU, bfloat16 on the accelerator."""
    for device in list_devices():
        dtype = "float32" if device == "cpu" else "bfloat16"
        yield from ((device, dtype, trial) for trial in build_trials(device, DTYPES[dtype]))


def check_model(device: str, dtype: str, trial: Trial) -> ModelCheck:
    """Run a trial unwatched and watched, and compare the outputs."""
    limit = MODEL_FACTOR * OUTPUT_TOLERANCE[DTYPES[dtype]]
    with torch.inference_mode():
        unwatched = trial.run_unwatched().double()
        try:
            watched = trial.run_watched().double()
        except UserError as problem:
            return ModelCheck(device, dtype, trial.name, math.nan, limit, str(problem))
    return ModelCheck(device, dtype, trial.name, float((watched - unwatched).norm() / unwatched.norm()), limit)


def _describe_difference(cases: list[Case], same_mask: list[Case]) -> str:
    """What distinguishes these cases from the others with their mask; "any" if nothing does."""
    templates = {"padding": "{} padding", "dtype": "{}", "grouped": "grouped heads: {}", "cached": "cached keys: {}"}
    words = []
    for name, template in templates.items():
        values = dict.fromkeys(getattr(case, name) for case in cases)
        if len(values) < len({getattr(case, name) for case in same_mask}):
            words.append(template.format(" or ".join({True: "yes", False: "no"}.get(v, v) for v in values)))
    return ", ".join(words) or "any"


# --- random masks -----------------------------------------------------------------------------------------------------


def _draw_padding(kind: str, generator: torch.Generator) -> Tensor:
    """Valid keys [batch, key]; the first sample has no padding."""
    valid = torch.ones(BATCH, KEYS, dtype=torch.bool)
    for b, n in enumerate((0, 5, 60)):
        match kind:
            case "left":
                valid[b, :n] = False
            case "right":
                valid[b, KEYS - n :] = False
            case "holes":
                valid[b, torch.randint(1, KEYS - 1, (n,), generator=generator)] = False
    return valid


def _draw_mask(Q: int, K: int, generator: torch.Generator) -> Tensor:
    """A boolean mask that differs by sample and head; a query always sees its own key."""
    own = torch.arange(K) == torch.arange(K - Q, K)[:, None]
    return (torch.rand(BATCH, HEADS, Q, K, generator=generator) < 0.6) | own


def _draw_bias(Q: int, K: int, generator: torch.Generator) -> Tensor:
    """An additive mask that differs by head and hides some pairs."""
    return torch.randn(1, HEADS, Q, K, generator=generator).where(_draw_mask(Q, K, generator)[:1], -torch.inf)


def _prefix_rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A prefix language model: causal, but every query sees the first keys, more of them in later samples."""
    return (k <= q) | (k < 4 + 3 * b)


# --- facts ----------------------------------------------------------------------------------------------------------


def _sdpa_kernel(device: str, dtype: torch.dtype) -> str:
    """The kernel that F.scaled_dot_product_attention chooses here without a mask."""
    x = torch.zeros(1, 8, 256, 64, device=device, dtype=dtype)
    return choose_sdpa_kernel(x, x, x).name.lower().removesuffix("_attention")


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _replace_nan(value: Any) -> Any:
    """Replace NaN by None: JSON has no NaN."""
    match value:
        case dict():
            return {key: _replace_nan(x) for key, x in value.items()}
        case list():
            return [_replace_nan(x) for x in value]
        case float() if math.isnan(value):
            return None
    return value
