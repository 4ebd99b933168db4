"""Mixtures of experts and DiTs written out slowly in float64, from the tensors of a file and its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    """A network of the LLaDA family with the names of its own files."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    visible: Callable[[int, int], bool]  # does query i see key j?

    def weight(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.weight(name)

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (self.weight(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotate(self, x: Tensor, position: int, width: int) -> Tensor:
        """Rotate the pairs (n, n + width / 2) of the first `width` entries."""
        out, half = x.clone(), width // 2
        for n in range(half):
            angle = torch.tensor(position * self.config["rope_theta"] ** (-2 * n / width), dtype=torch.float64)
            a, b = x[n], x[n + half]
            out[n], out[n + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [position, head, width], k and v with fewer heads → [position, head · width]."""
        length, heads, width = q.shape
        out = torch.zeros_like(q)
        for head in range(heads):
            shared = head * k.shape[1] // heads
            for i in range(length):
                keys = [j for j in range(length) if self.visible(i, j)]
                scores = torch.stack([q[i, head] @ k[j, shared] for j in keys]) / width**0.5
                out[i, head] = scores.softmax(0) @ v[keys, shared]
        return out.reshape(length, -1)

    def normed_heads(self, x: Tensor, heads: int, norm: str, rotary: int) -> Tensor:
        x = self.norm(x.reshape(len(x), heads, -1), norm)
        return torch.stack(
            [torch.stack([self.rotate(head, position, rotary) for head in row]) for position, row in enumerate(x)]
        )


def llada2_logits(tensors: dict[str, Tensor], config: dict[str, Any], ids: Tensor, block: int) -> Tensor:
    """The logits of a LLaDA2: [position, vocabulary]."""
    net = Mixture(tensors, config, lambda i, j: j // block <= i // block)
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rotary = int(width * config["partial_rotary_factor"])
    x = net.weight("model.word_embeddings.weight")[ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        qkv = net.norm(x, f"{at}.input_layernorm.weight") @ net.weight(f"{at}.attention.query_key_value.weight").T
        q, k, v = qkv.split([heads * width, kv_heads * width, kv_heads * width], -1)
        q = net.normed_heads(q, heads, f"{at}.attention.query_layernorm.weight", rotary)
        k = net.normed_heads(k, kv_heads, f"{at}.attention.key_layernorm.weight", rotary)
        attended = net.attend(q, k, v.reshape(len(ids), kv_heads, width))
        x = x + attended @ net.weight(f"{at}.attention.dense.weight").T
        h = net.norm(x, f"{at}.post_attention_layernorm.weight")
        if layer < config["first_k_dense_replace"]:
            x = x + net.mlp(h, f"{at}.mlp")
            continue
        routed = []
        for token in h:
            experts = llada2_route(net.weight(f"{at}.mlp.gate.weight") @ token, tensors, config, at)
            routed.append(sum(w * net.mlp(token, f"{at}.mlp.experts.{e}") for e, w in experts))
        x = x + torch.stack(routed) + net.mlp(h, f"{at}.mlp.shared_experts")
    return net.norm(x, "model.norm.weight") @ net.weight("lm_head.weight").T


def llada2_route(
    logits: Tensor, tensors: dict[str, Tensor], config: dict[str, Any], at: str
) -> list[tuple[int, float]]:
    """Sigmoid scores; a bias chooses groups and experts, and is no part of the weights."""
    scores = logits.sigmoid()
    choice = (scores + tensors[f"{at}.mlp.gate.expert_bias"].double()).tolist()
    per_group = len(choice) // config["n_group"]
    groups = [range(g * per_group, (g + 1) * per_group) for g in range(config["n_group"])]
    best_groups = sorted(groups, key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:2]))
    allowed = [e for g in best_groups[: config["topk_group"]] for e in g]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: config["num_experts_per_tok"]]
    total = sum(float(scores[e]) for e in chosen) if len(chosen) > 1 else 1.0
    return [(e, config["routed_scaling_factor"] * float(scores[e]) / total) for e in chosen]


def llada_moe_logits(tensors: dict[str, Tensor], config: dict[str, Any], ids: Tensor) -> Tensor:
    """The logits of a LLaDA-MoE: softmax weights that are not normalised again, and full attention."""
    net = Mixture(tensors, config, lambda i, j: True)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"] // heads
    x = net.weight("model.embed_tokens.weight")[ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = net.norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (h @ net.weight(f"{at}.self_attn.{part}_proj.weight").T for part in "qkv")
        q = net.normed_heads(q, heads, f"{at}.self_attn.q_norm.weight", width)
        k = net.normed_heads(k, kv_heads, f"{at}.self_attn.k_norm.weight", width)
        attended = net.attend(q, k, v.reshape(len(ids), kv_heads, width))
        x = x + attended @ net.weight(f"{at}.self_attn.o_proj.weight").T
        h = net.norm(x, f"{at}.post_attention_layernorm.weight")
        if not config["moe_layer_freq"][layer]:
            x = x + net.mlp(h, f"{at}.mlp")
            continue
        routed = []
        for token in h:
            weights = (net.weight(f"{at}.mlp.gate.weight") @ token).softmax(0)
            chosen = weights.argsort(descending=True)[: config["num_experts_per_tok"]].tolist()
            routed.append(sum(float(weights[e]) * net.mlp(token, f"{at}.mlp.experts.{e}") for e in chosen))
        x = x + torch.stack(routed)
    return net.norm(x, "model.norm.weight") @ net.weight("lm_head.weight").T


def dit_logits(tensors: dict[str, Tensor], config: dict[str, Any], ids: Tensor, block: int | None) -> Tensor:
    """The logits of an MDLM, or with a block size of a BD3-LM, number by number: [position, vocabulary]."""
    weights = {key.removeprefix("backbone."): tensor.double() for key, tensor in tensors.items()}
    width, heads = config["hidden_dim"], config["n_heads"]
    dim, length = width // heads, len(ids)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros((), dtype=torch.float64))

    def modulated_norm(x: Tensor, name: str, shift: Tensor, scale: Tensor) -> Tensor:
        rows = [(row - row.mean()) / (row.var(correction=0) + 1e-5).sqrt() for row in x]
        return torch.stack([row * weights[f"{name}.weight"] * (1 + scale) + shift for row in rows])

    def rotate(x: Tensor, position: int) -> Tensor:
        out, half = x.clone(), dim // 2
        for n in range(half):
            angle = position * weights["rotary_emb.inv_freq"][n]
            out[n] = x[n] * angle.cos() - x[n + half] * angle.sin()
            out[n + half] = x[n + half] * angle.cos() + x[n] * angle.sin()
        return out

    def attend(x: Tensor, name: str) -> Tensor:
        qkv = linear(x, name).reshape(length, 3, heads, dim)
        out = torch.zeros(length, heads, dim, dtype=torch.float64)
        for head in range(heads):
            q, k = ([rotate(qkv[i, part, head], i) for i in range(length)] for part in (0, 1))
            for i in range(length):
                seen = [j for j in range(length) if block is None or j // block <= i // block]
                shares = torch.stack([q[i] @ k[j] / dim**0.5 for j in seen]).softmax(0)
                out[i, head] = sum(share * qkv[j, 2, head] for share, j in zip(shares, seen, strict=True))
        return out.reshape(length, width)

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())

    def silu(x: Tensor) -> Tensor:
        return x / (1 + (-x).exp())

    noise = torch.tensor([1.0] * 128 + [0.0] * 128, dtype=torch.float64)  # cosines and sines of 0
    conditioning = silu(linear(silu(linear(noise, "sigma_map.mlp.0")), "sigma_map.mlp.2"))
    x = weights["vocab_embed.embedding"][ids]
    for layer in range(config["n_blocks"]):
        name = f"blocks.{layer}"
        numbers = linear(conditioning, f"{name}.adaLN_modulation").reshape(6, width)
        attended = attend(modulated_norm(x, f"{name}.norm1", numbers[0], numbers[1]), f"{name}.attn_qkv")
        x = x + numbers[2] * linear(attended, f"{name}.attn_out")
        hidden = gelu(linear(modulated_norm(x, f"{name}.norm2", numbers[3], numbers[4]), f"{name}.mlp.0"))
        x = x + numbers[5] * linear(hidden, f"{name}.mlp.2")
    shift, scale = linear(conditioning, "output_layer.adaLN_modulation").reshape(2, width)
    return linear(modulated_norm(x, "output_layer.norm_final", shift, scale), "output_layer.linear")
