"""Published checkpoints of each architecture with their parameters, for `floatscope models`.

EXAMPLES["llada2"][0]        # Example("inclusionAI/LLaDA2.0-mini", "16 B, 1.4 B active")

Parameters are those of the model cards. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A checkpoint on the hub, and its parameters; of a mixture, also those that process a token."""

    name: str
    parameters: str

    def __str__(self) -> str:
        return f"{self.name} ({self.parameters})"


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "llada": (
        Example("GSAI-ML/LLaDA-8B-Instruct", "8 B"),
        Example("GSAI-ML/LLaDA-8B-Base", "8 B"),
        Example("GSAI-ML/LLaDA-1.5", "8 B"),
    ),
    "llada2": (
        Example("inclusionAI/LLaDA2.0-mini", "16 B, 1.4 B active"),
        Example("inclusionAI/LLaDA2.1-mini", "16 B, 1.4 B active"),
        Example("inclusionAI/LLaDA2.0-flash", "100 B, 6.1 B active"),
        Example("inclusionAI/LLaDA2.1-flash", "100 B, 6.1 B active"),
    ),
    "llada-moe": (Example("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "7 B, 1.4 B active"),),
    "sdar": (
        Example("JetLM/SDAR-1.7B-Chat", "1.7 B"),
        Example("JetLM/SDAR-4B-Chat", "4 B"),
        Example("JetLM/SDAR-8B-Chat", "8 B"),
        Example("Gen-Verse/TraDo-8B-Instruct", "8 B"),
    ),
    "sdar-moe": (Example("JetLM/SDAR-30B-A3B-Chat", "30 B, 3 B active"),),
    "fast-dllm-v2": (
        Example("Efficient-Large-Model/Fast_dLLM_v2_1.5B", "1.5 B"),
        Example("Efficient-Large-Model/Fast_dLLM_v2_7B", "7 B"),
    ),
    "dream": (
        Example("Dream-org/Dream-v0-Instruct-7B", "7.6 B"),
        Example("Dream-org/Dream-Coder-v0-Instruct-7B", "7.6 B"),
        Example("apple/DiffuCoder-7B-Instruct", "7.6 B"),
    ),
    "a2d": (
        Example("dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "0.6 B"),
        Example("dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", "0.6 B"),
    ),
    "mdlm": (Example("kuleshov-group/mdlm-owt", "170 M"),),
    "bd3lm": (Example("kuleshov-group/bd3lm-owt-block_size4", "170 M"),),
    "bert": (
        Example("google-bert/bert-base-uncased", "110 M"),
        Example("answerdotai/ModernBERT-base", "149 M"),
    ),
    "roberta": (Example("FacebookAI/roberta-base", "125 M"),),
    "causal": (
        Example("HuggingFaceTB/SmolLM2-135M-Instruct", "135 M"),
        Example("openai-community/gpt2", "124 M"),
        Example("meta-llama/Llama-3.1-8B-Instruct", "8 B"),
    ),
}
"""Architecture → examples; one that is not listed has no checkpoint with a known name."""
