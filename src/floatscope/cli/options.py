"""The options that commands share, in groups, each checked before torch is imported.

A command names the groups it takes; `expand_groups` gives typer their fields as single options:

    @expand_groups
    def decode(model: ModelName, *, sampling: SamplingOptions, loading: ModelOptions) -> None: ...

So an option has the same name, help and check in every command that has it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from floatscope.errors import UserError, unknown_choice
from floatscope.syntax import parse_call

if TYPE_CHECKING:
    from floatscope.models.model import Model
    from floatscope.tasks.sample import Sample
    from floatscope.tasks.sample_files import SampleFile

Opt = typer.Option
DataOpt = partial(typer.Option, rich_help_panel="Data")
SamplingOpt = partial(typer.Option, rich_help_panel="Sampling")
ModelOpt = partial(typer.Option, rich_help_panel="Model")

# The tables these names are keys of import torch; a test compares them.
SAMPLERS = (
    *("ar", "confidence", "margin", "entropy", "random", "origin"),
    *("pc", "threshold", "dynamic", "factor", "eb", "klass", "renoise"),
)
TWINS = ("arm", "mdm", "mdm-adapted")
PRESETS = ("llada", "dream", "llada2", "llada2.1", "sdar", "fast-dllm-v2", "diffusion-gemma")
EOS_RULES = ("free", "never", "last")
DTYPES = ("float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "float64")
DEVICE = re.compile(r"cpu|mps|auto|cuda(:\d+)?")

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A hub id, a folder, a .gguf file, twin:NAME, smollm2:NAME or BASE+ADAPTER.",
        show_default=False,
    ),
]
ModelNames = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL…",
        help="Hub ids, folders, .gguf files, twin:NAME, smollm2:NAME or BASE+ADAPTER.",
        show_default=False,
    ),
]
DEVICE_HELP = "cpu, cuda, cuda:1, mps, or auto for all GPUs. Default: a GPU if there is one."
LICENCE_HELP = "Licence and source of the training data, for the model card."
DATA_HELP = "A file of questions, or twin:NAME for a shipped one (floatscope twins lists them)."
Data = Annotated[str, DataOpt("--data", metavar="FILE", help=DATA_HELP, show_default=False)]
OptionalData = Annotated[str | None, DataOpt("--data", metavar="FILE", help=DATA_HELP)]
OutFolder = Annotated[
    Path,
    Opt("--out", metavar="DIR", help="The output folder: a new one, or one to resume.", show_default=False),
]
Settings = Annotated[list[str], Opt("--set", metavar="NAME=VALUE", help="Set an option; may be repeated.")]
Chat = Annotated[
    bool | None,
    DataOpt("--chat/--no-chat", help="Use the chat template. Default: if there is one."),
]
BatchSize = Annotated[int | None, SamplingOpt(metavar="N", min=1, help="Samples per batch. Default: 8, on a GPU 32.")]
AsJson = Annotated[bool, Opt("--json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True)
class DataOptions:
    """How a file of questions is read."""

    limit: Annotated[int | None, DataOpt(metavar="N", min=1, help="Use only the first N samples.")] = None
    format: Annotated[str | None, DataOpt(help="The data format. Default: detected from the first object.")] = None
    skip_bad: Annotated[bool, DataOpt("--skip-bad", help="Skip entries that cannot be read, and report them.")] = False

    @property
    def are_set(self) -> bool:
        """Whether any of them differs from its default."""
        return self != DataOptions()

    def read(self, data: str) -> SampleFile:
        """Read the samples of a file."""
        from floatscope.tasks.sample_files import read_file

        return read_file(data, self.limit, format=self.format, skip_bad=self.skip_bad)

    def describe(self, data: str) -> dict[str, Any]:
        """The name and digest of the file, for the settings of a run."""
        from floatscope.tasks.sample_files import describe_source

        return describe_source(data, self.limit)


@dataclass(frozen=True)
class RetrievalOptions:
    """Where passages come from, if not from the file."""

    retrieve: Annotated[
        Path | None,
        DataOpt(metavar="DIR", help="Retrieve the passages from this index instead."),
    ] = None
    k: Annotated[int, DataOpt("-k", metavar="N", min=1, help="How many passages to retrieve.")] = 5

    def apply(self, samples: list[Sample]) -> tuple[list[Sample], float | None, dict[str, Any]]:
        """The samples with retrieved passages, the recall of gold passages, and what a run records about the index."""
        if self.retrieve is None:
            return samples, None, {}
        from floatscope.tasks.index import Index, retrieve_passages

        index = Index.open(self.retrieve)
        with_passages, recall = retrieve_passages(index, samples, self.k)
        stats = index.stats()
        record = {
            "index": self.retrieve.name,
            "index_passages": stats.passages,
            "index_sha256": stats.digest,
            "retrieved": self.k,
        }
        return with_passages, recall, record


@dataclass(frozen=True)
class QuestionOptions:
    """How questions become prompts, and how many are asked together."""

    template: Annotated[
        str,
        DataOpt(help="The prompt template: default, question-first, instruct, af-llada, af-others, or a TOML file."),
    ] = "default"
    chat: Chat = None
    batch_size: BatchSize = None

    def __post_init__(self) -> None:
        from floatscope.tasks.template import load_template

        load_template(self.template)

    @property
    def settings(self) -> dict[str, Any]:
        """As keyword arguments of the jobs."""
        return asdict(self)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. Options that are left out take the preset's value, or the model's default."""

    new_tokens: Annotated[
        int | None,
        SamplingOpt(metavar="N", min=0, help="Tokens to generate. Default: 32, or the preset's."),
    ] = None
    steps: Annotated[int | None, SamplingOpt(metavar="N", min=1, help="Denoising steps. Default: one per token.")] = (
        None
    )
    block: Annotated[
        int | None,
        SamplingOpt(metavar="N", min=1, help="Fill blocks of this length in order. Default: one block."),
    ] = None
    sampler: Annotated[
        str | None,
        SamplingOpt(help="Which positions a step commits: confidence, margin, entropy, random, threshold(tau=0.9), …"),
    ] = None
    preset: Annotated[str | None, SamplingOpt(help="The authors' settings: llada, dream, llada2, llada2.1, …")] = None
    temperature: Annotated[
        float | None,
        SamplingOpt(metavar="X", min=0, help="Temperature; 0 takes the most likely token."),
    ] = None
    top_p: Annotated[
        float | None,
        SamplingOpt(metavar="X", min=0, max=1, help="Draw from the fewest tokens with this much probability."),
    ] = None
    top_k: Annotated[int | None, SamplingOpt(metavar="N", min=1, help="Draw from this many tokens.")] = None
    guidance: Annotated[float | None, SamplingOpt(metavar="X", min=0, help="Scale of classifier-free guidance.")] = None
    eos: Annotated[
        str | None,
        SamplingOpt(help="When the end of text may be chosen: free, never or last."),
    ] = None
    stop: Annotated[bool | None, SamplingOpt("--stop/--no-stop", help="Stop at the end of text.")] = None
    seed: Annotated[int, SamplingOpt(metavar="N", help="Seed of everything that is random.")] = 0

    def __post_init__(self) -> None:
        if self.sampler is not None and (name := parse_call(self.sampler)[0]) not in SAMPLERS:
            raise unknown_choice("sampler", name, SAMPLERS)
        if self.preset is not None and self.preset not in PRESETS:
            raise unknown_choice("preset", self.preset, PRESETS)
        if self.eos is not None and self.eos not in EOS_RULES:
            raise unknown_choice("eos", self.eos, EOS_RULES)
        if self.top_p == 0:
            raise UserError(f"--top-p must be more than 0 and at most 1, got {self.top_p:g}")

    @property
    def settings(self) -> dict[str, Any]:
        """As keyword arguments of `decode` and of the jobs; None where nothing is given."""
        return asdict(self)


@dataclass(frozen=True)
class ModelOptions:
    """How a checkpoint is opened."""

    mask_id: Annotated[
        int | None,
        ModelOpt(metavar="N", min=0, help="Id of the mask token, if the checkpoint names none."),
    ] = None
    shift: Annotated[
        bool | None,
        ModelOpt("--shift/--no-shift", help="Row p predicts position p + 1, or p."),
    ] = None
    block_size: Annotated[
        int | None,
        ModelOpt(metavar="N", min=1, help="Size of the blocks of a block-causal checkpoint, if it names none."),
    ] = None
    device: Annotated[str | None, ModelOpt(help=DEVICE_HELP)] = None
    dtype: Annotated[str | None, ModelOpt(help="float32, bf16 or fp16.")] = None
    revision: Annotated[str | None, ModelOpt(help="Branch, tag or commit of a hub checkpoint.")] = None
    trust_remote_code: Annotated[
        bool, ModelOpt("--trust-remote-code", help="Run the checkpoint's own code, unchecked.")
    ] = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise unknown_choice("dtype", self.dtype, DTYPES)
        if self.device is not None and not DEVICE.fullmatch(self.device):
            raise UserError(f"unknown device '{self.device}'; allowed: cpu, cuda, cuda:0 …, mps, auto")

    @property
    def describing(self) -> dict[str, Any]:
        """The options of `describe`."""
        return {name: getattr(self, name) for name in ("mask_id", "shift", "block_size", "revision")}

    def load(self, name: str) -> Model:
        """Open a checkpoint."""
        from floatscope.models.loader import load

        return load(name, **asdict(self))


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer the fields of a command's option groups as options; the command receives the groups.

    Place in the signature is place in the help.
    """
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    types = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind = types[parameter.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            field_types = get_type_hints(kind, include_extras=True)
            for field in dataclasses.fields(kind):
                parameters.append(_keyword(field.name, field_types[field.name], field.default))
        else:
            parameters.append(_keyword(parameter.name, kind, parameter.default))

    @wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _keyword(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def check_models(names: list[str]) -> None:
    """Refuse a model that is named twice, a misspelt twin and a base that is not fetched."""
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UserError(f"the model {name} is given twice; give each model once")
        check_model(name)


def check_model(name: str) -> None:
    """Refuse a misspelt twin, a base that is not fetched, a path that does not exist and a hub that does not answer.

    It does not import torch.
    """
    from floatscope.models.bases import base_path, is_base_name
    from floatscope.models.checkpoint import read_config
    from floatscope.models.hub import check_hub, is_hub_id

    if is_base_name(name):
        base_path(name)
    elif "+" in name:
        return  # the loader knows which part is the adapter
    elif name.startswith("twin:"):
        if (twin := name.removeprefix("twin:")) not in TWINS:
            raise unknown_choice("twin", twin, TWINS)
    elif name and "\0" not in name and not name.startswith("~") and not Path(name).exists():
        if is_hub_id(name):
            check_hub(name)
        else:
            read_config(Path(name))


def parse_settings(texts: list[str]) -> dict[str, object]:
    """The values of `--set`: `["counts=1,5", "draws=2"]` → `{"counts": (1, 5), "draws": 2}`."""
    settings: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set takes NAME=VALUE, such as documents=10, got '{text}'")
        name = name.replace("-", "_")
        if name in settings:
            raise UserError(f"--set {name} is given twice; write several values as {name}=1,2")
        settings[name] = _parse_value(value)
    return settings


def _parse_value(text: str) -> object:
    if "," in text:
        return tuple(_parse_value(part) for part in text.split(","))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
