"""A checkpoint opened by its own code, because the user allowed it.

    module, tokenizer = read_model(folder, config, torch.device("cpu"), torch.float32)

Only for checkpoints that no row of the architecture table opens. That code can do anything this process can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from floatscope.errors import LIBRARY_ERRORS, UserError, join_names, summarize_error
from floatscope.models.silence import silence_libraries
from floatscope.models.tokenizer import ModelTokenizer
from floatscope.models.tokenizer_files import open_tokenizer, refuse_foreign_code

CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")  # the first that the checkpoint offers


def read_model(
    folder: Path, config: dict[str, Any], device: str | torch.device, dtype: torch.dtype
) -> tuple[nn.Module, ModelTokenizer | None]:
    """Return the module and the tokenizer, built by the checkpoint's code; refuse missing and unexpected tensors."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    auto_map = config.get("auto_map")
    name = next((n for n in CLASSES if isinstance(auto_map, dict) and n in auto_map), None)
    if name is None:
        raise UserError(
            f"{folder} has no model code (auto_map in its config.json must have one of {', '.join(CLASSES)})"
        )
    refuse_foreign_code(folder / "config.json", auto_map)
    try:
        with silence_libraries():
            module, info = getattr(transformers, name).from_pretrained(
                str(folder),
                trust_remote_code=True,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
                device_map=device if isinstance(device, str) else {"": device},
                output_loading_info=True,
            )
    except torch.OutOfMemoryError:
        raise
    except (StrictDataclassError, ImportError, OSError, SyntaxError, *LIBRARY_ERRORS) as error:
        raise UserError(f"the code of {folder} failed ({summarize_error(error)})") from error
    wrong_keys = {*info["missing_keys"], *info["unexpected_keys"]}
    if wrong_keys:
        raise UserError(f"{folder}: tensors missing or unexpected: {join_names(wrong_keys)}")
    return module, open_tokenizer(folder, trust_remote_code=True)
