"""A slow reference of decoding with edits: every row of attention in float64, every edit by its definition.

The `Reference` has its own attention function and knows the edits only as the plain `Rule`s that a test gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import floatscope as fs
from floatscope.canvas import CanvasState, Step
from floatscope.sampling import autoregress, denoise
from floatscope.schema import State

MASK, EOS, BOS = 49, 48, 47
PROMPTS = [[BOS, *range(1, 18)], [BOS, 8, 9], [BOS, *range(20, 30)]]
NAMES = ["a", "b", "c"]
KINDS = ("unshifted", "shifted", "arm", "arm without cache")
LAYERS, HEADS, NEW = 2, 4, 4
WATCH = fs.Watch(fields=("matrix", "received"), verify=True)


@cache
def build_model(kind: str, seed: int = 0) -> fs.Model:
    """A tiny model with random weights and shared key heads."""
    torch.manual_seed(seed)
    module = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=LAYERS,
                    num_attention_heads=HEADS, num_key_value_heads=2, initializer_range=0.3,
                    bos_token_id=BOS, eos_token_id=None, pad_token_id=0)
    ).eval()  # fmt: skip
    paradigm, mask_id = (fs.Paradigm.ARM, None) if kind.startswith("arm") else (fs.Paradigm.MDM, MASK)
    spec = fs.ModelSpec(kind, paradigm, mask_id, shift=kind != "unshifted", bos_id=BOS,
                        eos_id=EOS, supports_cache=kind != "arm without cache")  # fmt: skip
    return fs.Model(module, spec)


# Picks keys: (reference, sample, layer, head) → keys in order.
PickKeys = Callable[["Reference", int, int, int], list[int]]


@dataclass(frozen=True)
class Rule:
    """The definition of an edit."""

    action: str  # hide | add | move | spread | sink | scale key | scale value | freeze | silence | replace
    keys: PickKeys | None = None
    to: PickKeys | None = None
    amount: float = 0.0
    steps: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    rows: PickKeys | None = None  # the positions whose rows it changes; None: all

    def is_active(self, step: int, layer: int, head: int | None) -> bool:
        """`head` None: any head."""
        limits = ((self.steps, step), (self.layers, layer), (self.heads, head))
        return all(allowed is None or index is None or index in allowed for allowed, index in limits)


def anchors(k: int, of: str = "before", layer: int | None = None) -> PickKeys:
    return lambda r, b, own, h: r.order(of, b, own if layer is None else layer, h)[:k]


def middle(k: int, of: str = "before") -> PickKeys:
    def pick(r: Reference, b: int, layer: int, h: int) -> list[int]:
        order = r.order(of, b, layer, h)
        centre = (len(order) - 1) / 2
        near = sorted(range(len(order)), key=lambda place: (abs(place - centre), place))
        return [order[place] for place in near[:k]]

    return pick


def least(keep: float, rows: str = "all") -> PickKeys:
    def pick(r: Reference, b: int, layer: int, h: int) -> list[int]:
        order = r.order("before", b, layer, h, rows)
        count = keep if isinstance(keep, int) else -int(-round(len(order) * keep, 6) // 1)
        return order[count:]

    return pick


def first(k: int = 1) -> PickKeys:
    return lambda r, b, layer, h: [int(r.canvas.valid[b].int().argmax())] * k


def positions(*offsets: int) -> PickKeys:
    return lambda r, b, layer, h: [first()(r, b, layer, h)[0] + j for j in offsets]


def region(name: str) -> PickKeys:
    def pick(r: Reference, b: int, layer: int, h: int) -> list[int]:
        if name in State.__members__:
            return (r.canvas.states[b] == State[name]).nonzero()[:, 0].tolist()
        inside = r.canvas.regions.member[b, :, r.canvas.regions.names.index(name)]
        return (inside & r.canvas.valid[b]).nonzero()[:, 0].tolist()

    return pick


@dataclass
class Reference:
    model: fs.Model
    rules: list[Rule]
    token: int = 0  # written by `replace`
    orders: list[dict] = field(default_factory=list)  # [step]: keys by decreasing lift, per sample, layer, head, rows
    lifts: dict = field(default_factory=dict)  # of the latest step
    matrices: list[list[torch.Tensor]] = field(default_factory=list)  # [step][layer]
    sums: dict = field(default_factory=dict)
    frozen: dict = field(default_factory=dict)
    moved: dict = field(default_factory=dict)  # [sample]: the attention that the rules move, in the plain attention
    movable: dict = field(default_factory=dict)  # [sample]: the rows and heads of the calls in which a rule is active

    def doses(self) -> list[float]:
        if any(rule.action in ("add", "sink", "scale key", "freeze", "replace") for rule in self.rules):
            return [float("nan")] * len(self.canvas.tokens)
        return [self.moved[b] / max(1, self.movable[b]) for b in range(len(self.canvas.tokens))]

    def decode(self, out: fs.Decoding, target_ids: torch.Tensor | None = None) -> list[Step]:
        """Repeat a decoding with this attention."""
        spec, module = self.model.spec, self.model.module
        before = module.config._attn_implementation
        AttentionInterface.register("reference", lambda *a, **k: self.attend(*a, **k))
        AttentionMaskInterface.register("reference", lambda *a, **k: None)
        module.set_attn_implementation("reference")
        given = {"end_ids": spec.stop_ids, "samples": out.samples, "target_ids": target_ids}
        if spec.paradigm == "arm":
            no_cache = any(rule.action == "replace" for rule in self.rules)
            self.run = self.model.forward if no_cache else self.model.cached_forward()
        else:
            self.run = self.model.forward
            given |= {"mask_id": spec.mask_id, "shift": spec.shift, "suffix": len(out.layout.suffix)}
        try:
            go = autoregress if spec.paradigm == "arm" else denoise
            return list(go(self.forward, out.initial_canvas, out.sampling, **given))
        finally:
            module.set_attn_implementation(before)

    def forward(self, canvas: CanvasState, rows: slice) -> torch.Tensor:
        for rule in self.rules:
            if rule.action == "replace" and rule.is_active(canvas.step, 0, 0):
                if canvas.step == 0:
                    self.canvas = canvas
                    self.begin()
                    self.model.forward(canvas, rows)
                canvas = replace(canvas, tokens=self.replace_tokens(rule, canvas))
        self.canvas = canvas
        self.begin()
        return self.run(canvas, rows)

    def begin(self) -> None:
        step = self.canvas.step
        del self.orders[step:], self.matrices[step:]
        self.orders.append({})
        self.matrices.append([])
        self.lifts = {}

    def replace_tokens(self, rule: Rule, canvas: CanvasState) -> torch.Tensor:
        tokens = canvas.tokens.clone()
        for b in range(len(tokens)):
            lifts = [lift for (sample, *_, rows), lift in self.lifts.items() if sample == b and rows == "all"]
            keys = [j for j in lifts[0] if not canvas.masked[b, j]]
            mean = {j: sum(lift[j] for lift in lifts) / len(lifts) for j in keys}
            for j in sorted(keys, key=lambda j: -mean[j])[: int(rule.amount)]:
                tokens[b, j] = self.token
        return tokens

    def order(self, of: str, b: int, layer: int, h: int, rows: str = "all") -> list[int]:
        step = {"now": self.canvas.step, "before": max(0, self.canvas.step - 1), "first": 0}[of]
        return self.orders[step][b, layer, h, rows]

    def attend(self, module, query, key, value, attention_mask, scaling, **_):
        layer, step = module.layer_idx, self.canvas.step
        B, H, Q, _ = query.shape
        K = key.shape[2]
        q, k, v = query.double(), *(x.double().repeat_interleave(H // x.shape[1], 1) for x in (key, value))
        causal, valid = self.model.spec.paradigm == "arm", self.canvas.valid
        row_positions = torch.arange(K - Q, K)
        A, output = torch.zeros(B, H, Q, K).double(), torch.zeros(B, H, Q, v.shape[-1]).double()
        for b in range(B):
            visible = valid[b].expand(Q, K).clone()
            if causal:
                visible &= torch.arange(K) <= row_positions[:, None]
            counted = [i for i in range(Q) if valid[b, row_positions[i]]]
            for h in range(H):
                plain = attention(q[b, h], k[b, h], scaling, visible)
                self.rank(plain, visible, counted, b, layer, h)
                self.add_dose(plain, visible, counted, row_positions, b, layer, h)
                A[b, h], output[b, h] = self.attend_edited(q, k, v, scaling, visible, row_positions, b, layer, h, step)
        self.matrices[-1].append(A)
        return output.transpose(1, 2).to(query.dtype).contiguous(), None

    def rank(self, A, visible, counted, b, layer, h) -> None:
        K = A.shape[1]
        masked = [i for i in counted if self.canvas.masked[b, i]] if bool(self.canvas.masked[b].any()) else counted
        for rows, selected in (("all", counted), ("masked", masked)):
            at = (b, layer, h, rows)
            got, visible_rows, n = A[selected].sum(0), visible[selected].sum(0), len(selected)
            uniform = (visible[selected] / visible[selected].sum(-1, keepdim=True).double()).sum(0)
            if len(A) < K and at in self.sums:  # of the rows that were computed before
                for now, then in zip((got, uniform, visible_rows), self.sums[at][:3], strict=True):
                    now[: len(then)] += then
                n += self.sums[at][3]
            self.sums[at] = got, uniform, visible_rows, n
            ranked = [j for j in range(K) if visible_rows[j] >= max(1, min(16, n))]
            lift = {j: float(got[j] / uniform[j]) for j in ranked}
            self.lifts[at] = lift
            self.orders[-1][at] = sorted(ranked, key=lambda j: -lift[j])

    def add_dose(self, plain, visible, counted, row_positions, b, layer, h) -> None:
        """Row by row, key by key: what each rule takes away from a key."""
        moved, movable = 0.0, 0
        if self.canvas.active is None or bool(self.canvas.active[b]):
            rules = [rule for rule in self.rules if rule.is_active(self.canvas.step, layer, None)]
            movable = len(counted) if rules else 0
            for rule in rules:
                if rule.heads is not None and h not in rule.heads:
                    continue
                sources = [] if rule.keys is None else rule.keys(self, b, layer, h)
                targets = [None] * len(sources) if rule.to is None else rule.to(self, b, layer, h)
                allowed = None if rule.rows is None else rule.rows(self, b, layer, h)
                for i in counted:
                    own = int(row_positions[i])
                    if allowed is not None and own not in allowed:
                        continue
                    moved += rule.action == "silence"
                    for j, target in zip(sources, targets, strict=False):
                        stays = (
                            (rule.action == "hide" and j == own)
                            or (rule.action == "move" and (j == target or not visible[i, target]))
                        )  # fmt: skip
                        share = abs(1 - rule.amount) if rule.action == "scale value" else 1.0
                        moved += 0.0 if stays else share * float(plain[i, j])
        self.moved[b] = self.moved.get(b, 0.0) + moved
        self.movable[b] = self.movable.get(b, 0) + movable

    def attend_edited(self, q, k, v, scaling, visible, row_positions, b, layer, h, step):
        q, k, v = q[b, h], k[b, h].clone(), v[b, h].clone()
        extra, silent = None, False
        mine = [rule for rule in self.rules if rule.action == "freeze" or rule.is_active(step, layer, h)]
        for rule in mine:
            if rule.action == "freeze" and (rule.layers is None or layer in rule.layers):
                if rule.heads is not None and h not in rule.heads:
                    continue
                if step == rule.steps[0]:
                    self.frozen[id(rule), b, layer, h] = q, k.clone()
                q, k = self.frozen.get((id(rule), b, layer, h), (q, k))
                k = k.clone()
            if rule.action in ("scale key", "scale value"):
                for j in rule.keys(self, b, layer, h):
                    (k if rule.action == "scale key" else v)[j] *= rule.amount
            if rule.action == "sink":
                extra = rule.amount
            silent |= rule.action == "silence"

        def rows_of(rule: Rule) -> list[int]:
            allowed = None if rule.rows is None else rule.rows(self, b, layer, h)
            return [i for i in range(len(row_positions)) if allowed is None or int(row_positions[i]) in allowed]

        scores = q @ k.T * scaling
        for rule in mine:
            for j in rule.keys(self, b, layer, h) if rule.action in ("hide", "add") else ():
                rows = [i for i in rows_of(rule) if rule.action == "add" or int(row_positions[i]) != j]
                scores[rows, j] += rule.amount if rule.action == "add" else -torch.inf
        scores = scores.masked_fill(~visible, -torch.inf)
        wide = scores if extra is None else torch.cat([scores, torch.full_like(scores[:, :1], extra)], 1)
        before = torch.softmax(wide, -1).nan_to_num(0.0)[:, : scores.shape[1]]
        A = before.clone()
        for rule in mine:
            if rule.action not in ("move", "spread"):
                continue
            sources = rule.keys(self, b, layer, h)
            targets = [None] * len(sources) if rule.to is None else rule.to(self, b, layer, h)
            for a, p in zip(sources, targets, strict=False):
                for i in rows_of(rule):
                    if p is None:
                        A[i] += before[i, a] * visible[i] / max(1, int(visible[i].sum()))
                    elif visible[i, p]:
                        A[i, p] += before[i, a]
                    else:
                        continue
                    A[i, a] -= before[i, a]
        return A, (torch.zeros_like(v[: len(A)]) if silent else A @ v)


def attention(q, k, scaling, visible):
    return torch.softmax((q @ k.T * scaling).masked_fill(~visible, -torch.inf), -1).nan_to_num(0.0)


def run_decode(model: fs.Model, edits, **given) -> tuple[fs.Decoding, list[list[torch.Tensor]]]:
    """Decode with edits and `verify`; also return the matrices of every step and layer."""
    settings = {"samples": NAMES, "new_tokens": NEW, "stop": False, "watch": WATCH, **given}
    if model.spec.paradigm == "mdm" and "sampler" not in settings:
        settings = {"steps": 3, **settings}
    out = fs.decode(model, settings.pop("prompts", PROMPTS), edits=edits, **settings)
    return out, [[layer.fields["matrix"] for layer in out.capture.layers] for _ in out]


def compare(kind: str, edits, rules: list[Rule], token: int = 0, seed: int = 0, **given) -> Reference:
    """`edits` in floatscope equal `rules` in the reference: attention, commits, tokens and confidences."""
    model = build_model(kind, seed)
    out, matrices = run_decode(model, edits, **given)
    reference = Reference(model, rules, token)
    target_ids = given.get("target_ids")
    steps = reference.decode(out, None if target_ids is None else torch.tensor(target_ids))
    assert len(steps) == len(out.steps)
    for got, want, ours, theirs in zip(out.steps, steps, matrices, reference.matrices, strict=True):
        rows = want.before.valid
        for layer, (A, B) in enumerate(zip(ours, theirs, strict=True)):
            row_positions = rows[:, None, rows.shape[1] - A.shape[2] :, None]
            off = ((A - B) * row_positions).abs().max()
            assert off < 1e-4, f"step {want.before.step}, layer {layer}: off by {off:.1e}"
        assert got.commits.position.tolist() == want.commits.position.tolist()
        assert torch.equal(got.after.tokens, want.after.tokens)
        torch.testing.assert_close(got.commits.confidence, want.commits.confidence, atol=1e-4, rtol=1e-3)
    doses = torch.tensor(out.doses), torch.tensor(reference.doses())
    torch.testing.assert_close(*doses, atol=1e-5, rtol=1e-4, equal_nan=True)
    return reference
