"""Files that ask for too much, or compute nonsense: each is refused by name, in bounded time and memory."""

from __future__ import annotations

import json
import resource
import struct
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product

import pytest
import torch
import transformers
from test_gguf import ARRAY, STRING, UINT32, architecture, header, string
from tiny_checkpoints import change_weights, edit_json, write_tiny

import floatscope as fs
from floatscope.models import limited_process
from floatscope.models.description import describe
from floatscope.models.limited_process import Limits
from floatscope.models.tokenizer_files import open_tokenizer
from pairs import every_pair, slow_except

LIMITS = Limits(seconds=1.0)  # less than usual, to save time
SECONDS, MEMORY = 10, 2e9
ACTIONS = {"load": lambda path: fs.load(path, device="cpu"), "describe": describe}
needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs the extra gguf")


@pytest.fixture(autouse=True)
def _limits(monkeypatch):
    monkeypatch.setattr(limited_process, "DEFAULT_LIMITS", LIMITS)


def test_the_usual_limits_end_within_20_seconds_and_2_gigabytes():
    usual = limited_process.Limits()
    assert usual.seconds <= 12
    assert usual.memory <= 1.2e9


@contextmanager
def refused(*parts: str):
    """Expect one printable sentence with these parts; little processor time and memory in this process and the child.

    The time is that of the processor, as these tests run beside others. The memory is the largest so far, also of the
    tests before: where those needed more than the bound, it may not grow.
    """
    seconds, most = _seconds(), max(MEMORY, _largest_memory())
    with pytest.raises(fs.UserError) as error:
        yield
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert message.isprintable()
    assert _seconds() - seconds < SECONDS
    assert _largest_memory() <= most


USAGES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _seconds() -> float:
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, USAGES))


def _largest_memory() -> int:
    return max(1024 * resource.getrusage(usage).ru_maxrss for usage in USAGES)


# --- config.json -----------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 512, "hidden_size": 32}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
NEO = {"num_heads": 4, "num_layers": 2, "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]]}
PROPHET = {"num_encoder_layers": 1, "num_decoder_layers": 1, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32}
CONFIGS = {  # the setting → the class, its config class, a small network, the changes
    "attention_types": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        NEO,
        {"attention_types": [[["global", "local"], 10**12]]},
    ),
    "num_blocks": ("xLSTMForCausalLM", "xLSTMConfig", {"num_blocks": 2, "num_heads": 4}, {"num_blocks": 10**9}),
    "num_decoder_layers": (
        "ProphetNetForCausalLM",
        "ProphetNetConfig",
        PROPHET | {"num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4},
        {"num_decoder_layers": 10**8},
    ),
    "num_hidden_layers": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        LAYERS | {"head_dim": 8},
        {"num_hidden_layers": 10**9, "layer_types": None},
    ),
    "num_local_experts": (
        "MixtralForCausalLM",
        "MixtralConfig",
        LAYERS | {"num_local_experts": 2},
        {"num_local_experts": 10**9},
    ),
}


@pytest.mark.parametrize("case", slow_except(CONFIGS, "attention_types", "num_hidden_layers"))
def test_a_config_that_describes_a_giant_is_refused(tmp_path, case):
    class_name, config_name, settings, changes = CONFIGS[case]
    config = getattr(transformers, config_name)(**SIZES, **settings)
    getattr(transformers, class_name)(config).save_pretrained(tmp_path / "m")
    edit_json(tmp_path / "m" / "config.json", **changes)
    with refused(str(tmp_path / "m")):
        fs.load(tmp_path / "m", device="cpu")


def test_the_sentence_names_the_config_and_the_remedy(tmp_path):
    class_name, config_name, settings, changes = CONFIGS["attention_types"]
    config = getattr(transformers, config_name)(**SIZES, **settings)
    getattr(transformers, class_name)(config).save_pretrained(tmp_path / "m")
    assert fs.load(tmp_path / "m", device="cpu").spec.paradigm == "arm"
    edit_json(tmp_path / "m" / "config.json", **changes)
    for act in ACTIONS.values():
        with refused(str(tmp_path / "m" / "config.json"), "cannot be opened (it needs more than ", "download it again"):
            act(tmp_path / "m")


def test_a_config_that_pads_four_tokens_to_millions_is_refused(tmp_path):
    settings = {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}
    config = transformers.Mamba2Config(**SIZES, **settings, chunk_size=4, time_step_limit=[0.0, 1e9])
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path / "m")
    assert fs.load(tmp_path / "m", device="cpu").spec.paradigm == "arm"
    edit_json(tmp_path / "m" / "config.json", chunk_size=10**7)
    with refused(str(tmp_path / "m" / "config.json"), "cannot be opened (it needs more than"):
        fs.load(tmp_path / "m", device="cpu")


# --- GGUF ------------------------------------------------------------------------------------------------------------


def number(name: str, value: int) -> tuple[str, int, bytes]:
    return name, UINT32, struct.pack("<I", value)


LLAMA = (
    architecture("llama"),
    number("llama.block_count", 1),
    number("llama.context_length", 64),
    number("llama.embedding_length", 32),
    number("llama.feed_forward_length", 48),
    number("llama.attention.head_count", 4),
)
START = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
TENSOR = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string("a")
GGUFS = {
    "a header alone": header(*LLAMA),
    "a header with tensors that are not there": header(*LLAMA, tensors={"token_embd.weight": (32, 512)}),
    "tensors larger than the file": header(*LLAMA, tensors={"token_embd.weight": (2**31, 2**31)}) + bytes(64),
    "many dimensions": TENSOR + struct.pack("<I", 10**6) + b"\xff" * 8 * 10**6 + bytes(64),
    "many tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0) + bytes(64),
    "many values": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62) + bytes(64),
    "a long array": START + string("a") + struct.pack("<IIQ", ARRAY, STRING, 2**61) + bytes(64),
    "arrays in arrays": START + string("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 10**5,
    "a giant width": header(
        *LLAMA[:3], number("llama.embedding_length", 2**31), *LLAMA[4:], tensors={"token_embd.weight": (8, 8)}
    )
    + bytes(512),
}  # fmt: skip


@needs_gguf
@pytest.mark.parametrize(("case", "action"), [*product(GGUFS, ["load"]), ("a giant width", "describe")])
def test_a_gguf_file_with_absurd_counts_is_refused(tmp_path, case, action):
    file = tmp_path / "m.gguf"
    file.write_bytes(GGUFS[case])
    with refused(str(file)):
        ACTIONS[action](file)


@needs_gguf
@pytest.mark.parametrize("action", ACTIONS)
def test_a_gguf_file_with_fewer_weights_than_its_network_is_refused_before_they_are_allocated(tmp_path, action):
    file = tmp_path / "m.gguf"
    wide = (*LLAMA[:3], number("llama.embedding_length", 2**14), *LLAMA[4:])
    file.write_bytes(header(*wide, tensors={"token_embd.weight": (8, 8)}) + bytes(512))
    with refused(f"{file}: tensors are missing: ", "weights are needed, but it holds 64"):
        ACTIONS[action](file)


@pytest.mark.slow
def test_texts_of_a_sparse_gguf_file_do_not_fill_the_memory(tmp_path):
    file = tmp_path / "m.gguf"
    with file.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 20))
        for i in range(20):  # the values are holes of the file: 1 GiB each, and nothing on the disk
            stream.write(string(str(i)) + struct.pack("<IQ", STRING, 2**30))
            stream.seek(2**30, 1)
        stream.truncate()
    with refused(str(file), "cannot be opened (it needs more than", "download it again"):
        fs.load(file, device="cpu")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def explode(folder, character, times=40):
    """Let the normaliser double a character again and again."""
    content = json.loads((folder / "tokenizer.json").read_text())
    double = {"type": "Replace", "pattern": {"String": character}, "content": 2 * character}
    content["normalizer"] = {"type": "Sequence", "normalizers": [double] * times}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("character", slow_except(["a", "Z", " "], "a"))
def test_a_normaliser_that_doubles_a_common_character_is_refused(tmp_path, character):
    folder = explode(write_tiny(tmp_path / "m"), character)
    with refused(f"{folder / 'tokenizer.json'} cannot be opened (it needs more than", "download it again"):
        fs.load(folder, device="cpu")


@pytest.mark.slow
def test_a_normaliser_that_waits_for_a_rare_character_is_stopped_there(tmp_path):
    tokenizer = fs.load(explode(write_tiny(tmp_path / "m"), "語"), device="cpu").tokenizer
    ids = tokenizer.encode("plain text")
    with refused("the tokenizer of ", "/m cannot read this text (it needs more than", "use another checkpoint"):
        tokenizer.encode("plain 語")
    assert tokenizer.encode("plain text") == ids


@pytest.mark.slow
def test_a_decoder_that_explodes_is_stopped(tmp_path):
    folder = write_tiny(tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    double = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], *[double] * 40]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = fs.load(folder, device="cpu").tokenizer
    ids = tokenizer.encode("a q")
    for method in (tokenizer.decode, tokenizer.pieces):
        with refused("cannot read this text (it needs more than"):
            method(ids)


TEMPLATES = [
    "{{ 'a' * 20000000000 }}",
    "{{ (10**7) ** (10**7) }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ range(10**12) | list }}",
    "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(40) }}",
    "{{ 'a' | center(20000000000) }}",
    "{{ '%20000000000d' | format(1) }}",
    "{% if messages[0].content | length > 3 %}{{ 'a' * 20000000000 }}{% endif %}",
]


@pytest.mark.parametrize("template", slow_except(TEMPLATES, TEMPLATES[0], TEMPLATES[4], TEMPLATES[-1]))
def test_a_template_that_asks_for_too_much_is_stopped(tmp_path, template):
    folder = write_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = open_tokenizer(folder)
    with refused("the chat template of ", "/m failed (", "; encode with chat=False"):
        tokenizer.encode("what floats?", chat=True)
    assert tokenizer.encode("what floats?")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% set a = {'b': 1} %}{{ dict(**a)['b'] }} ** {{ '**' }} {{ 2**10 }}", "1 ** ** 1024"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}{{ messages | tojson }}",
            None,
        ),
        ("{%- for i in range(3) %}\n  {{ i }}\n{%- endfor %}{% generation %}g{% endgeneration %}", None),
    ],
)
def test_an_ordinary_template_is_rendered_as_transformers_does(tmp_path, template, text):
    folder = write_tiny(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = open_tokenizer(folder)
    messages = [{"role": "user", "content": "what ** <é>\n floats?"}]
    theirs = tokenizer.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render(messages) == theirs
    assert text in (None, theirs)


# --- files that open and compute nonsense ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_refused(tmp_path, value):
    folder = write_tiny(tmp_path / "m", "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: tensors[name].view(-1)[7:8].fill_(value))
    with refused(f"{folder}: its tensor {name} contains NaN or infinity in float32; download it again"):
        fs.load(folder, device="cpu")


def test_a_network_that_computes_nan_is_refused(tmp_path):
    config = transformers.GraniteConfig(**SIZES, **LAYERS)
    transformers.GraniteForCausalLM(config).save_pretrained(tmp_path / "m")
    edit_json(tmp_path / "m" / "config.json", embedding_multiplier=float("nan"))
    with refused(str(tmp_path / "m"), "computes NaN for ordinary tokens, in float32; correct its config.json"):
        fs.load(tmp_path / "m", device="cpu")


ROPES = {"linear": {}, "dynamic": {"original_max_position_embeddings": 64}, "yarn": {}}


@every_pair(kind=ROPES, place=["rope_scaling", "rope_parameters"], factor=[float("nan"), 0, 0.0, -1.0, float("inf")])
def test_a_rotation_without_a_positive_factor_is_refused(tmp_path, kind, place, factor):
    folder = write_tiny(tmp_path / "m", "llama")
    rope = {"rope_type": kind, "factor": factor, "rope_theta": 1e4, **ROPES[kind]}
    edit_json(folder / "config.json", **({"rope_parameters": None} | {place: rope}))
    with refused(str(folder), "factor"):
        fs.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("kind", "field"), [("llama", "max_position_embeddings"), ("llada", "max_sequence_length"), ("gpt2", "n_positions")]
)
@pytest.mark.parametrize("positions", [0, -1, -(10**9)])
def test_a_network_without_positions_is_refused(tmp_path, kind, field, positions):
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "m")
    else:
        write_tiny(tmp_path / "m", kind)
    edit_json(tmp_path / "m" / "config.json", **{field: positions})
    with refused(str(tmp_path / "m"), f"max_position_embeddings {positions}; expected at least 1"):
        fs.load(tmp_path / "m", device="cpu")


def test_two_tokens_with_one_id_are_refused(tmp_path):
    folder = write_tiny(tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["b"] = content["model"]["vocab"]["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with refused(f"{folder / 'tokenizer.json'} is damaged (", "both have id ", "download it again"):
        fs.load(folder, device="cpu")


def test_half_precision_that_overflows_is_refused_with_the_remedy(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    change_weights(folder, lambda tensors: tensors["lm_head.weight"].view(-1)[:1].fill_(1e6))
    assert fs.load(folder, device="cpu").dtype == torch.float32
    with refused("lm_head.weight contains NaN or infinity in float16", "dtype='float32'"):
        fs.load(folder, device="cpu", dtype="float16")
