"""GGUF files: opened by transformers with the extra, refused by name if transformers cannot read them."""

from __future__ import annotations

import struct
from importlib.util import find_spec

import pytest
import torch
from tiny_checkpoints import write_tiny

import floatscope as fs
from floatscope.models.description import describe
from floatscope.models.gguf import read_header, read_model
from pairs import slow_except

STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(*values: tuple[str, int, bytes], tensors: dict[str, tuple[int, ...]] | None = None) -> bytes:
    tensors = tensors or {}
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    parts += [string(name) + struct.pack("<I", kind) + content for name, kind, content in values]
    for name, shape in tensors.items():
        dims = struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in shape)
        parts.append(string(name) + dims + struct.pack("<IQ", 0, 0))
    return b"".join(parts)


def architecture(name: str) -> tuple[str, int, bytes]:
    return "general.architecture", STRING, string(name)


@pytest.mark.parametrize(("name", "shown"), [("llada", "LLaDA"), ("dream", "Dream"), ("llada-moe", "LLaDA-MoE")])
@pytest.mark.parametrize("act", [fs.load, describe], ids=["load", "describe"])
def test_diffusion_models_are_refused_by_name(tmp_path, name, shown, act):
    file = tmp_path / "m.gguf"
    file.write_bytes(header(architecture(name)))
    message = rf"m\.gguf is a {shown} GGUF \({name}\), which transformers cannot read; use the safetensors checkpoint"
    with pytest.raises(fs.UserError, match=message):
        act(file)


@pytest.mark.parametrize("every", slow_except([17, 1], 17))
def test_a_header_with_arrays_is_read(tmp_path, every):
    words = struct.pack("<IQ", STRING, 3) + string("a") + string("ö") + string("")
    numbers = struct.pack("<IQ3f", FLOAT32, 3, 1, 2, 3)
    nested = struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ2I", UINT32, 2, 7, 8)
    file = tmp_path / "m.gguf"
    content = header(
        ("tokenizer.ggml.tokens", ARRAY, words),
        ("numbers", ARRAY, numbers),
        ("nested", ARRAY, nested),
        ("llama.block_count", UINT32, struct.pack("<I", 2)),
        architecture("llama"),
        tensors={"a": (3, 4), "b": (5,)},
    )
    content += bytes(3)  # where the tensors are: at most 8 weights per byte
    file.write_bytes(content)
    parsed = read_header(file)
    assert (parsed.architecture, parsed.get("block_count"), parsed.parameters) == ("llama", 2, 17)
    assert parsed.metadata["tokenizer.ggml.tokens"] == 3
    for size in range(0, len(content), every):
        file.write_bytes(content[:size])
        with pytest.raises(
            fs.UserError, match=r"m\.gguf is not a GGUF file, or it is damaged \(.*\); download it again"
        ):
            read_header(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 something else",
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + b"x" * 100,
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<I", 77),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<IIQ", ARRAY, UINT32, 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string("a") + struct.pack("<I", ARRAY) * 100_000,
    ],
)
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(fs.UserError, match="is not a GGUF file, or it is damaged"):
        fs.load(file)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(fs.UserError, match=r"m\.gguf does not exist; give the path of a \.gguf file"):
        fs.load(tmp_path / "m.gguf")


def test_the_missing_extra_is_named(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(header(architecture("llama")))
    monkeypatch.setattr("floatscope.models.gguf.find_spec", lambda name: None)
    with pytest.raises(fs.UserError, match=r"needs the package gguf; install it with pip install 'floatscope\[gguf\]'"):
        fs.load(file, device="cpu")


needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs the extra gguf")


def write_gguf(file, source, *, heads=None, blocks=None, merges=("h i", "t h")):
    """Write a small Llama in the format of llama.cpp."""
    import gguf

    config, state = source.module.config, source.module.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(blocks or config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    heads = config.num_attention_heads if heads is None else heads
    add = writer.add_uint32 if isinstance(heads, int) else writer.add_string
    add("llama.attention.head_count", heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = {i: token for token, i in source.tokenizer.hf.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    names |= {300: "hi", 301: "th"}
    writer.add_token_list([names.get(i, f"<unused{i}>") for i in range(config.vocab_size)])
    writer.add_token_types([1 if i < 256 or i in (300, 301) else 3 for i in range(config.vocab_size)])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(source.spec.bos_id)
    writer.add_eos_token_id(source.spec.eos_id)
    leaves = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {
        "token_embd": state["model.embed_tokens.weight"],
        "output_norm": state["model.norm.weight"],
        "output": state["lm_head.weight"],
    }
    for i in range(config.num_hidden_layers):
        for ours, theirs in leaves.items():
            tensor = state[f"model.layers.{i}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):  # llama.cpp interleaves the halves that are rotated together
                count = config.num_attention_heads
                tensor = (
                    tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
                )
            tensors[f"blk.{i}.{theirs}"] = tensor
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return fs.load(write_tiny(tmp_path_factory.mktemp("source") / "m", "llama", kv_heads=4), device="cpu")


@needs_gguf
def test_a_small_llama_survives_the_round_trip(tmp_path, source, capfd):
    """Written by the gguf package, opened by transformers: the same network."""
    file = tmp_path / "m.gguf"
    write_gguf(file, source)
    assert describe(file).parameters == sum(p.numel() for p in source.module.parameters())
    capfd.readouterr()
    model = fs.load(file, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert (model.spec.paradigm, model.spec.shift, model.spec.eos_id) == ("arm", True, source.spec.eos_id)
    ids = torch.randint(0, 256, (1, 9))
    with torch.no_grad():
        torch.testing.assert_close(model.module(ids).logits, source.module(ids).logits, rtol=1e-4, atol=1e-4)
    assert model.tokenizer.encode("hi")[-1] == 300
    assert model.tokenizer.decode(model.tokenizer.encode("hi there")) == "hi there"
    description = describe(file)
    facts = (description.transformers_class, description.spec.eos_id, description.vocab_size)
    assert facts == ("LlamaForCausalLM", source.spec.eos_id, 512)


@needs_gguf
def test_a_file_is_parsed_once_and_the_library_is_left_as_it_was(tmp_path, source, monkeypatch):
    import gguf

    file, opened, original = tmp_path / "m.gguf", [], gguf.GGUFReader

    class Reader(original):
        def __init__(self, path, *arguments):
            opened.append(path)
            super().__init__(path, *arguments)

    write_gguf(file, source)
    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    read_model(file, torch.device("cpu"), torch.float32)
    assert len(opened) == 1
    assert gguf.GGUFReader is Reader


@needs_gguf
def test_the_files_of_another_model_beside_it_are_not_read(tmp_path, source):
    file = tmp_path / "m.gguf"
    write_gguf(file, source)
    alone = fs.load(file, device="cpu").tokenizer.encode("hi there")
    for other in write_tiny(tmp_path / "other").iterdir():
        if other.suffix != ".safetensors":
            (tmp_path / other.name).write_bytes(other.read_bytes())
    tokenizer = fs.load(file, device="cpu").tokenizer
    assert tokenizer.encode("hi there") == alone
    assert not tokenizer.has_chat_template
    assert describe(file).has_chat_template is False


@needs_gguf
@pytest.mark.parametrize("act", [lambda file: fs.load(file, device="cpu"), describe], ids=["load", "describe"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": "x"}, "attention.head_count 'x' is not a number above 0"),
        ({"heads": 0}, "attention.head_count 0 is not a number above 0"),
        ({"blocks": 10**9}, "has 1000000000 layers, but there are 21 tensors"),
        ({"blocks": 3}, "missing"),
        ({"merges": ["no where"]}, "cannot be opened by transformers ("),
    ],
    ids=str,
)
def test_an_invalid_file_is_refused_by_load_and_describe(tmp_path, source, act, options, message):
    file = tmp_path / "m.gguf"
    write_gguf(file, source, **options)
    with pytest.raises(fs.UserError) as error:
        act(file)
    assert message in str(error.value)
    assert str(error.value).startswith(str(file))


@needs_gguf
@pytest.mark.parametrize(
    "act", [lambda file, **k: fs.load(file, device="cpu", **k), describe], ids=["load", "describe"]
)
def test_truncated_files_unknown_architectures_and_wrong_mask_ids_are_refused(tmp_path, source, act):
    file = tmp_path / "m.gguf"
    write_gguf(file, source)
    with pytest.raises(fs.UserError, match="mask id 99999 is not a valid token id; expected 0 … 511"):
        act(file, mask_id=99999)
    content = file.read_bytes()
    for size in (len(content) - 500, len(content) // 2):
        file.write_bytes(content[:size])
        with pytest.raises(fs.UserError, match=r"m\.gguf "):
            act(file)
    file.write_bytes(header(architecture("\x1b[31mfoo")))
    with pytest.raises(fs.UserError, match=r"cannot be opened by transformers \(.*\\x1b\[31mfoo"):
        act(file)
