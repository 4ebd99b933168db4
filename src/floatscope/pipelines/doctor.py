"""Is this machine fit, and is captured == executed on it?

    report = examine()
    report.ok, report.failures

Three questions. *What is here*: versions, devices, the attention kernels torch chooses. *Which backend serves which
case*, and *is it right*: every kind of attention call is drawn at random, run and reduced as in a real watch, and
compared with the dense float64 result. *Does a whole model agree*: tiny models of several kinds run unwatched and then
watched with `verify=True`; their outputs must agree too, which shows that the mask was read as the model meant it.
"""

from __future__ import annotations

import math
import platform
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from floatscope.canvas import Regions, build_canvas
from floatscope.capture import kernel
from floatscope.capture.ask import ReductionSpec, row_mean
from floatscope.capture.attention import Attention, attend
from floatscope.capture.received import backend_for, receive
from floatscope.capture.verify import OUTPUT, REDUCED, call_errors
from floatscope.capture.visibility import Visibility
from floatscope.capture.watcher import Watch
from floatscope.errors import UserError
from floatscope.models.model import Model, ModelSpec
from floatscope.models.place import one_thread
from floatscope.pipelines.decode import decode
from floatscope.pipelines.watch import watch

BATCH, HEADS, DIM, KEYS, CACHED = 3, 4, 32, 128, 119
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PADDINGS = ("none", "left", "right", "holes")
LAYERED = 3
"""A whole model may differ by so many times what one call may: rounding grows through its layers. A mask that is read
wrongly shows as a difference of tens of percent."""

Mask = Callable[[int, int, Tensor | None, torch.Generator], Visibility]
MASKS: dict[str, Mask] = {
    "full": lambda Q, K, valid, _: Visibility.full(Q, K, valid),
    "causal": lambda Q, K, valid, _: Visibility.causal(Q, K, valid),
    "window": lambda Q, K, valid, _: Visibility.window(Q, K, 20, valid),
    "block-causal": lambda Q, K, valid, _: Visibility.block(Q, K, 16, valid),
    "boolean": lambda Q, K, valid, draw: Visibility.by_mask(_some_pairs(Q, K, draw), Q, K, valid),
    "additive": lambda Q, K, valid, draw: Visibility.by_mask(_biases(Q, K, draw), Q, K, valid),
    "rule": lambda Q, K, valid, _: Visibility.by_rule(Q, K, _prefix_is_seen, valid, batch=BATCH),
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
class Outcome:
    """What became of a case: who served it, why not triton, and the largest error of each quantity."""

    case: Case
    backend: str
    reason: str | None
    errors: dict[str, float]

    @property
    def limits(self) -> dict[str, float]:
        return {what: limit(what, self.case.dtype) for what in self.errors}

    @property
    def wrong(self) -> list[str]:
        return [what for what, error in self.errors.items() if not error <= self.limits[what]]


@dataclass(frozen=True)
class Trial:
    """A tiny model, run as it is and run watched; both give the numbers that must agree."""

    name: str
    plain: Callable[[], Tensor]
    watched: Callable[[], Tensor]


@dataclass(frozen=True)
class Verdict:
    device: str
    dtype: str
    model: str
    error: float  # watched against unwatched output, norm-wise
    limit: float
    problem: str | None = None  # what `verify=True` found

    @property
    def ok(self) -> bool:
        return self.problem is None and self.error <= self.limit


@dataclass(frozen=True)
class Served:
    device: str
    mask: str
    where: str
    cases: int
    backend: str
    reason: str | None  # why not triton


@dataclass(frozen=True)
class Report:
    facts: dict[str, str]
    outcomes: list[Outcome] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """A line for each check that failed, naming it."""
        calls = [
            f"{describe(o.case)}: {what} is off by {o.errors[what]:.1e} (allowed {o.limits[what]:.0e})"
            for o in self.outcomes
            for what in o.wrong
        ]
        models = [
            f"{v.model} on {v.device} in {v.dtype}: "
            + (v.problem or f"watched and unwatched outputs differ by {v.error:.1e} (allowed {v.limit:.0e})")
            for v in self.verdicts
            if not v.ok
        ]
        return calls + models

    @property
    def ok(self) -> bool:
        return not self.failures

    def worst(self) -> dict[tuple[str, str, str], float]:
        """(device, dtype, quantity) → the largest error over all cases; NaN if there is one."""
        errors: dict[tuple[str, str, str], list[float]] = {}
        for o in self.outcomes:
            for what, error in o.errors.items():
                errors.setdefault((o.case.device, o.case.dtype, what), []).append(error)
        return {at: math.nan if any(map(math.isnan, found)) else max(found) for at, found in errors.items()}

    def served(self) -> list[Served]:
        """Which backend serves which cases: a row per mask, more where the answer depends on something else."""
        rows = []
        for device, mask in dict.fromkeys((o.case.device, o.case.mask) for o in self.outcomes):
            alike = [o for o in self.outcomes if (o.case.device, o.case.mask) == (device, mask)]
            for backend, reason in dict.fromkeys((o.backend, o.reason) for o in alike):
                mine = [o.case for o in alike if (o.backend, o.reason) == (backend, reason)]
                where = _what_sets_apart(mine, [o.case for o in alike])
                rows.append(Served(device, mask, where, len(mine), backend, reason))
        return rows

    def as_json(self) -> dict[str, Any]:
        calls = [{**asdict(o), "limits": o.limits, "ok": not o.wrong} for o in self.outcomes]
        models = [{**asdict(v), "ok": v.ok} for v in self.verdicts]
        whole = {"ok": self.ok, "failures": self.failures, "facts": self.facts, "calls": calls, "models": models}
        plain: dict[str, Any] = _without_nan(whole)
        return plain


def examine() -> Report:
    """Everything, on the CPU and on an accelerator if there is one."""
    found = facts()
    with one_thread():
        return Report(found, [check(case) for case in cases()], [try_out(*trial) for trial in trials()])


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def facts() -> dict[str, str]:
    """What a result here may depend on."""
    found = {"python": platform.python_version()}
    found |= {name: _version(name) for name in ("torch", "transformers", "triton")}
    found["cpu"] = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if "cuda" not in devices():
        found["accelerator"] = "none"
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        memory = f"{about.total_memory / 2**30:.0f} GiB"
        found[f"cuda:{i}"] = f"{about.name}, capability {about.major}.{about.minor}, {memory}"
    for device in devices():
        found[f"attention on {device}"] = ", ".join(f"{_kernel(device, d)} ({name})" for name, d in DTYPES.items())
    return found


def cases() -> Iterator[Case]:
    for choice in product(devices(), MASKS, PADDINGS, DTYPES, (False, True), (False, True)):
        yield Case(*choice)


def check(case: Case) -> Outcome:
    """Run and reduce one random call as a watched forward would, and compare with dense float64."""
    call, ask, carry = draw_call(case)
    done = attend(call)
    known = done.lse is not None
    reason = kernel.unserved(call) if known else "the model's kernel does not give its log-sum-exp"
    errors = call_errors(call, done.output, ask, carry, receive(call, done.lse, ask, carry))
    return Outcome(case, backend_for(call, known), reason, errors)


def limit(what: str, dtype: str) -> float:
    return (OUTPUT if what == "output" else REDUCED)[DTYPES[dtype]]


def describe(case: Case) -> str:
    words = [f"{case.mask} mask", f"{case.padding} padding" if case.padding != "none" else "", case.dtype]
    words += ["grouped heads" if case.grouped else "", "cached keys" if case.cached else "", f"on {case.device}"]
    return ", ".join(word for word in words if word)


def draw_call(case: Case) -> tuple[Attention, ReductionSpec, Tensor]:
    """The call, what to add up (all rows, half of them, a single one), and values to carry."""
    draw = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))
    kv, Q, K = HEADS // 2 if case.grouped else HEADS, KEYS - CACHED if case.cached else KEYS, KEYS
    dtype, device = DTYPES[case.dtype], case.device
    q = torch.randn(BATCH, HEADS, Q, DIM, generator=draw).to(device, dtype)
    k, v = torch.randn(2, BATCH, kv, K, DIM, generator=draw).to(device, dtype)
    valid = _padding(case.padding, draw)
    see = MASKS[case.mask](Q, K, None if case.padding == "none" else valid.to(device), draw)
    if see.mask is not None:
        mask = see.mask.to(device) if see.mask.dtype == torch.bool else see.mask.to(device, dtype)  # as SDPA asks
        see = Visibility.by_mask(mask, Q, K, see.valid)
    rows = valid[:, K - Q :].to(device)  # [batch, query]
    half = rows & (torch.rand(BATCH, Q, generator=draw) < 0.5).to(device)
    single = F.one_hot(rows.int().argmax(-1), Q).bool() & rows
    weights = torch.stack([rows, half, single], -1).float()
    entropy = row_mean(rows, see.seen_keys(device).mean(1).expand(BATCH, -1))
    carry = torch.rand(BATCH, K, 3, generator=draw).to(device)
    return Attention(q, k, v, see, 0.2), ReductionSpec(weights, entropy), carry


def trials() -> Iterator[tuple[str, str, Trial]]:
    """(device, dtype, trial): float32 on the CPU, bfloat16 on the accelerator."""
    for device in devices():
        dtype = "float32" if device == "cpu" else "bfloat16"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = [make(device, DTYPES[dtype]) for make in (_denoiser, _causal, _windowed, _plain)]
        yield from ((device, dtype, trial) for trial in made)


def try_out(device: str, dtype: str, trial: Trial) -> Verdict:
    allowed = LAYERED * OUTPUT[DTYPES[dtype]]
    with torch.inference_mode():
        plain = trial.plain().double()
        try:
            watched = trial.watched().double()
        except UserError as problem:
            return Verdict(device, dtype, trial.name, math.nan, allowed, str(problem))
    return Verdict(device, dtype, trial.name, float((watched - plain).norm() / plain.norm()), allowed)


def _what_sets_apart(mine: list[Case], alike: list[Case]) -> str:
    """What these cases have and others of their mask have not; "any" if nothing sets them apart."""
    words = {"padding": "{} padding", "dtype": "{}", "grouped": "grouped heads: {}", "cached": "cached keys: {}"}
    found = []
    for name, word in words.items():
        values = dict.fromkeys(getattr(case, name) for case in mine)
        if len(values) < len({getattr(case, name) for case in alike}):
            found.append(word.format(" or ".join({True: "yes", False: "no"}.get(v, v) for v in values)))
    return ", ".join(found) or "any"


# --- the models -----------------------------------------------------------------------------------------------------

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # a real initialiser's 0.02 would attend to everything alike
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _denoiser(device: str, dtype: torch.dtype) -> Trial:
    """A Llama without its causal mask, on two prompts of different lengths; a whole decoding is verified too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4)).to(device, dtype).eval()
    model = Model(module, ModelSpec("denoiser", "mdm", mask_id=63))
    prompts = [list(range(1, 13)), list(range(20, 27))]
    regions = Regions.from_spans([{"prompt": [(0, 12)]}, {"prompt": [(5, 12)]}], 20)
    canvas = build_canvas(prompts, 8, 63)
    canvas = replace(canvas, tokens=canvas.tokens.to(device), states=canvas.states.to(device))

    def logits() -> Tensor:
        return model.forward(canvas)[canvas.valid]

    def watched() -> Tensor:
        decode(model, prompts, new_tokens=8, steps=4, regions=regions, watch=Watch("full", verify=True))
        return _under_watch(module, logits)

    return Trial("masked diffusion, left padding", logits, watched)


def _causal(device: str, dtype: torch.dtype) -> Trial:
    """A Llama with grouped heads: a left-padded prompt, then one more token on its cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)).to(device, dtype).eval()
    tokens, valid = _tokens(device)

    def logits() -> Tensor:
        start = module(tokens[:, :-1], attention_mask=valid[:, :-1].long(), use_cache=True)
        more = module(tokens[:, -1:], attention_mask=valid.long(), past_key_values=start.past_key_values)
        return torch.cat([start.logits, more.logits], 1)[valid]

    return Trial("causal, grouped heads, cache, left padding", logits, lambda: _under_watch(module, logits))


def _windowed(device: str, dtype: torch.dtype) -> Trial:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=6)
    module = MistralForCausalLM(config).to(device, dtype).eval()
    tokens, valid = _tokens(device)

    def logits() -> Tensor:
        out: Tensor = module(tokens, attention_mask=valid.long(), use_cache=False).logits
        return out[valid]

    return Trial("sliding window, left padding", logits, lambda: _under_watch(module, logits))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q * 4, k, v, is_causal=True)
        added: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return x + added


def _plain(device: str, dtype: torch.dtype) -> Trial:
    module = nn.Sequential(nn.Embedding(64, 64), _Layer(), _Layer(), nn.Linear(64, 64)).to(device, dtype).eval()
    tokens, _ = _tokens(device)
    return Trial(
        "plain torch, scaled_dot_product_attention",
        lambda: module(tokens),
        lambda: _under_watch(module, lambda: module(tokens)),
    )


def _tokens(device: str) -> tuple[Tensor, Tensor]:
    """Two rows of tokens, the second with left padding."""
    tokens = torch.arange(1, 49).reshape(2, 24)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, :7] = False
    return tokens.to(device), valid.to(device)


def _under_watch(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    with watch(module, keep="full", verify=True) as seen:
        out = run()
    assert seen.traces
    return out


# --- the calls ------------------------------------------------------------------------------------------------------


def _padding(kind: str, draw: torch.Generator) -> Tensor:
    """Valid keys [batch, key]; the first sample is always whole."""
    valid = torch.ones(BATCH, KEYS, dtype=torch.bool)
    for b, n in enumerate((0, 5, 60)):
        match kind:
            case "left":
                valid[b, :n] = False
            case "right":
                valid[b, KEYS - n :] = False
            case "holes":
                valid[b, torch.randint(1, KEYS - 1, (n,), generator=draw)] = False
    return valid


def _some_pairs(Q: int, K: int, draw: torch.Generator) -> Tensor:
    """A boolean mask of its own for every sample and head; a query always sees itself."""
    own = torch.arange(K) == torch.arange(K - Q, K)[:, None]
    return (torch.rand(BATCH, HEADS, Q, K, generator=draw) < 0.6) | own


def _biases(Q: int, K: int, draw: torch.Generator) -> Tensor:
    return torch.randn(1, HEADS, Q, K, generator=draw).where(_some_pairs(Q, K, draw)[:1], -torch.inf)


def _prefix_is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A prefix language model: causal, but the first keys are seen by all, more of them in later samples."""
    return (k <= q) | (k < 4 + 3 * b)


# --- the facts ------------------------------------------------------------------------------------------------------


def _kernel(device: str, dtype: torch.dtype) -> str:
    """The kernel F.scaled_dot_product_attention takes here without a mask."""
    x = torch.zeros(1, 8, 256, 64, device=device, dtype=dtype)
    return SDPBackend(torch._fused_sdp_choice(x, x, x)).name.lower().removesuffix("_attention")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _without_nan(value: Any) -> Any:
    """JSON has no word for NaN: null."""
    match value:
        case dict():
            return {key: _without_nan(x) for key, x in value.items()}
        case list():
            return [_without_nan(x) for x in value]
        case float() if math.isnan(value):
            return None
    return value
