"""Decoding under edits, restated: every row of attention written out in float64, every edit by its definition.

A `Restated` model attends by a function of its own; it knows the edits only as the plain `Rule`s a test gives it.
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
def model_of(kind: str, seed: int = 0) -> fs.Model:
    """A tiny model with random weights and shared key heads."""
    torch.manual_seed(seed)
    module = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=LAYERS,
                    num_attention_heads=HEADS, num_key_value_heads=2, initializer_range=0.3,
                    bos_token_id=BOS, eos_token_id=None, pad_token_id=0)
    ).eval()  # fmt: skip
    arm = kind.startswith("arm")
    spec = fs.ModelSpec(kind, "arm" if arm else "mdm", None if arm else MASK, shift=kind != "unshifted", bos_id=BOS,
                        eos_id=EOS, cache=kind != "arm without cache")  # fmt: skip
    return fs.Model(module, spec)


# A rule that picks keys: (the restated model, sample, layer, head) → keys in their order.
Pick = Callable[["Restated", int, int, int], list[int]]


@dataclass(frozen=True)
class Rule:
    """What an edit does, in the words of its definition."""

    does: str  # hide | add | move | spread | sink | scale key | scale value | freeze | silence | replace
    keys: Pick | None = None
    to: Pick | None = None
    amount: float = 0.0
    steps: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    rows: Pick | None = None  # the positions whose rows it changes; None: all

    def acts(self, step: int, layer: int, head: int) -> bool:
        given = ((self.steps, step), (self.layers, layer), (self.heads, head))
        return all(several is None or one in several for several, one in given)


def anchors(k: int, of: str = "before", layer: int | None = None) -> Pick:
    return lambda r, b, own, h: r.order(of, b, own if layer is None else layer, h)[:k]


def middle(k: int, of: str = "before") -> Pick:
    def pick(r: Restated, b: int, layer: int, h: int) -> list[int]:
        order = r.order(of, b, layer, h)
        centre = (len(order) - 1) / 2
        near = sorted(range(len(order)), key=lambda place: (abs(place - centre), place))
        return [order[place] for place in near[:k]]

    return pick


def least(keep: float, rows: str = "all") -> Pick:
    def pick(r: Restated, b: int, layer: int, h: int) -> list[int]:
        order = r.order("before", b, layer, h, rows)
        kept = keep if isinstance(keep, int) else -int(-round(len(order) * keep, 6) // 1)
        return order[kept:]

    return pick


def first(k: int = 1) -> Pick:
    return lambda r, b, layer, h: [int(r.canvas.valid[b].int().argmax())] * k


def positions(*several: int) -> Pick:
    return lambda r, b, layer, h: [first()(r, b, layer, h)[0] + j for j in several]


def region(name: str) -> Pick:
    def pick(r: Restated, b: int, layer: int, h: int) -> list[int]:
        if name in State.__members__:
            return (r.canvas.states[b] == State[name]).nonzero()[:, 0].tolist()
        inside = r.canvas.regions.member[b, :, r.canvas.regions.names.index(name)]
        return (inside & r.canvas.valid[b]).nonzero()[:, 0].tolist()

    return pick


@dataclass
class Restated:
    model: fs.Model
    rules: list[Rule]
    token: int = 0  # that is put in another's place
    orders: list[dict] = field(default_factory=list)  # of each step: keys by falling lift, by sample, layer, head, rows
    lifts: dict = field(default_factory=dict)  # of the latest step
    matrices: list[list[torch.Tensor]] = field(default_factory=list)  # [step][layer]
    sums: dict = field(default_factory=dict)
    frozen: dict = field(default_factory=dict)

    def decode(self, out: fs.Decoding, forced: torch.Tensor | None = None) -> list[Step]:
        """The same decoding, restated."""
        spec, module = self.model.spec, self.model.module
        before = module.config._attn_implementation
        AttentionInterface.register("restated", lambda *a, **k: self.attend(*a, **k))
        AttentionMaskInterface.register("restated", lambda *a, **k: None)
        module.set_attn_implementation("restated")
        given = {"end_ids": spec.stop_ids, "samples": out.samples, "forced": forced}
        if spec.paradigm == "arm":
            rewrites = any(rule.does == "replace" for rule in self.rules)
            self.run = self.model.forward if rewrites else self.model.cached()
        else:
            self.run = self.model.forward
            given |= {"mask_id": spec.mask_id, "shift": spec.shift, "suffix": out._suffix}
        try:
            go = autoregress if spec.paradigm == "arm" else denoise
            return list(go(self.forward, out._canvas, out.how, **given))
        finally:
            module.set_attn_implementation(before)

    def forward(self, canvas: CanvasState, rows: slice) -> torch.Tensor:
        for rule in self.rules:
            if rule.does == "replace" and rule.acts(canvas.step, 0, 0):
                if canvas.step == 0:
                    self.canvas = canvas
                    self.begin()
                    self.model.forward(canvas, rows)
                canvas = replace(canvas, tokens=self.replaced(rule, canvas))
        self.canvas = canvas
        self.begin()
        return self.run(canvas, rows)

    def begin(self) -> None:
        step = self.canvas.step
        del self.orders[step:], self.matrices[step:]
        self.orders.append({})
        self.matrices.append([])
        self.lifts = {}

    def replaced(self, rule: Rule, canvas: CanvasState) -> torch.Tensor:
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
        stands = torch.arange(K - Q, K)
        A, output = torch.zeros(B, H, Q, K).double(), torch.zeros(B, H, Q, v.shape[-1]).double()
        for b in range(B):
            sees = valid[b].expand(Q, K).clone()
            if causal:
                sees &= torch.arange(K) <= stands[:, None]
            counted = [i for i in range(Q) if valid[b, stands[i]]]
            for h in range(H):
                plain = attention(q[b, h], k[b, h], scaling, sees)
                self.rank(plain, sees, counted, b, layer, h)
                A[b, h], output[b, h] = self.changed(q, k, v, scaling, sees, stands, b, layer, h, step)
        self.matrices[-1].append(A)
        return output.transpose(1, 2).to(query.dtype).contiguous(), None

    def rank(self, A, sees, counted, b, layer, h) -> None:
        K = A.shape[1]
        masked = [i for i in counted if self.canvas.masked[b, i]] if bool(self.canvas.masked[b].any()) else counted
        for rows, these in (("all", counted), ("masked", masked)):
            at = (b, layer, h, rows)
            got, seen, n = A[these].sum(0), sees[these].sum(0), len(these)
            even = (sees[these] / sees[these].sum(-1, keepdim=True).double()).sum(0)
            if len(A) < K and at in self.sums:  # of the rows that were computed before
                for now, then in zip((got, even, seen), self.sums[at][:3], strict=True):
                    now[: len(then)] += then
                n += self.sums[at][3]
            self.sums[at] = got, even, seen, n
            ranked = [j for j in range(K) if seen[j] >= max(1, min(16, n))]
            lift = {j: float(got[j] / even[j]) for j in ranked}
            self.lifts[at] = lift
            self.orders[-1][at] = sorted(ranked, key=lambda j: -lift[j])

    def changed(self, q, k, v, scaling, sees, stands, b, layer, h, step):
        q, k, v = q[b, h], k[b, h].clone(), v[b, h].clone()
        extra, silent = None, False
        mine = [rule for rule in self.rules if rule.does == "freeze" or rule.acts(step, layer, h)]
        for rule in mine:
            if rule.does == "freeze" and (rule.layers is None or layer in rule.layers):
                if rule.heads is not None and h not in rule.heads:
                    continue
                if step == rule.steps[0]:
                    self.frozen[id(rule), b, layer, h] = q, k.clone()
                q, k = self.frozen.get((id(rule), b, layer, h), (q, k))
                k = k.clone()
            if rule.does in ("scale key", "scale value"):
                for j in rule.keys(self, b, layer, h):
                    (k if rule.does == "scale key" else v)[j] *= rule.amount
            if rule.does == "sink":
                extra = rule.amount
            silent |= rule.does == "silence"

        def chosen(rule: Rule) -> list[int]:
            several = None if rule.rows is None else rule.rows(self, b, layer, h)
            return [i for i in range(len(stands)) if several is None or int(stands[i]) in several]

        scores = q @ k.T * scaling
        for rule in mine:
            for j in rule.keys(self, b, layer, h) if rule.does in ("hide", "add") else ():
                rows = [i for i in chosen(rule) if rule.does == "add" or int(stands[i]) != j]
                scores[rows, j] += rule.amount if rule.does == "add" else -torch.inf
        scores = scores.masked_fill(~sees, -torch.inf)
        wide = scores if extra is None else torch.cat([scores, torch.full_like(scores[:, :1], extra)], 1)
        before = torch.softmax(wide, -1).nan_to_num(0.0)[:, : scores.shape[1]]
        A = before.clone()
        for rule in mine:
            if rule.does not in ("move", "spread"):
                continue
            sources = rule.keys(self, b, layer, h)
            targets = [None] * len(sources) if rule.to is None else rule.to(self, b, layer, h)
            for a, p in zip(sources, targets, strict=False):
                for i in chosen(rule):
                    if p is None:
                        A[i] += before[i, a] * sees[i] / max(1, int(sees[i].sum()))
                    elif sees[i, p]:
                        A[i, p] += before[i, a]
                    else:
                        continue
                    A[i, a] -= before[i, a]
        return A, (torch.zeros_like(v[: len(A)]) if silent else A @ v)


def attention(q, k, scaling, sees):
    return torch.softmax((q @ k.T * scaling).masked_fill(~sees, -torch.inf), -1).nan_to_num(0.0)


def decoded(model: fs.Model, edits, **given) -> tuple[fs.Decoding, list[list[torch.Tensor]]]:
    """Decoding under edits, verified, with the matrices of every step and layer."""
    settings = {"samples": NAMES, "new_tokens": NEW, "stop": False, "watch": WATCH, **given}
    if model.spec.paradigm == "mdm" and "sampler" not in settings:
        settings = {"steps": 3, **settings}
    out = fs.decode(model, settings.pop("prompts", PROMPTS), edits=edits, **settings)
    return out, [[layer.fields["matrix"] for layer in out.layers] for _ in out]


def compare(kind: str, edits, rules: list[Rule], token: int = 0, seed: int = 0, **given) -> Restated:
    """floatscope under `edits` does what the `rules` say: the same attention, commits, tokens and confidences."""
    model = model_of(kind, seed)
    out, matrices = decoded(model, edits, **given)
    restated = Restated(model, rules, token)
    forced = given.get("forced")
    steps = restated.decode(out, None if forced is None else torch.tensor(forced))
    assert len(steps) == len(out.steps)
    for got, want, ours, theirs in zip(out.steps, steps, matrices, restated.matrices, strict=True):
        rows = want.before.valid
        for layer, (A, B) in enumerate(zip(ours, theirs, strict=True)):
            stands = rows[:, None, rows.shape[1] - A.shape[2] :, None]
            off = ((A - B) * stands).abs().max()
            assert off < 1e-4, f"step {want.before.step}, layer {layer}: off by {off:.1e}"
        assert got.commits.position.tolist() == want.commits.position.tolist()
        assert torch.equal(got.after.tokens, want.after.tokens)
        torch.testing.assert_close(got.commits.confidence, want.commits.confidence, atol=1e-4, rtol=1e-3)
    return restated
