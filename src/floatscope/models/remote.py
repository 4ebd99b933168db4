"""A checkpoint's own code, run because the user said so.

    module, text = read(folder, config, torch.device("cpu"), torch.float32)

Only for architectures no row of the families table opens. That code can do anything this process can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from floatscope.errors import LIBRARY_ERRORS, UserError, join_names, reason
from floatscope.models.quiet import quiet
from floatscope.models.text import ModelTokenizer, open_text, refuse_foreign_code

CLASSES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel")  # the first that the checkpoint offers


def read(
    folder: Path, config: dict[str, Any], place: str | torch.device, dtype: torch.dtype
) -> tuple[nn.Module, ModelTokenizer | None]:
    """Module and tokenizer by the checkpoint's code; missing and unexpected tensors are refused here too."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    offered = config.get("auto_map")
    name = next((n for n in CLASSES if isinstance(offered, dict) and n in offered), None)
    if name is None:
        raise UserError(
            f"{folder} brings no model code (auto_map in its config.json names none of {', '.join(CLASSES)})"
        )
    refuse_foreign_code(folder / "config.json", offered)
    try:
        with quiet():
            module, info = getattr(transformers, name).from_pretrained(
                str(folder),
                trust_remote_code=True,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype,
                device_map=place if isinstance(place, str) else {"": place},
                output_loading_info=True,
            )
    except torch.OutOfMemoryError:
        raise
    except (StrictDataclassError, ImportError, OSError, SyntaxError, *LIBRARY_ERRORS) as error:
        raise UserError(f"the code of {folder} failed ({reason(error)})") from error
    bad = {*info["missing_keys"], *info["unexpected_keys"]}
    if bad:
        raise UserError(f"{folder}: tensors missing or unexpected: {join_names(bad)}")
    return module, open_text(folder, trust_remote_code=True)
