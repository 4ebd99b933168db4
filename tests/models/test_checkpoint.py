"""Checkpoint folders, intact, damaged and hostile: each is read or refused with a reason before weights are read."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from tiny_checkpoints import change_weights, edit_json, write_tiny

import floatscope as fs
from floatscope.errors import explain_read_errors
from floatscope.files.digests import fingerprint
from floatscope.models.checkpoint import INDEX_FILE, read_checkpoint


def load_error(folder) -> str:
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path):
    return write_tiny(tmp_path / "m")


@pytest.fixture
def sharded(tmp_path):
    return write_tiny(tmp_path / "s", shards=3)


def test_headers_give_shapes_dtypes_and_parameters(folder):
    checkpoint = read_checkpoint(folder)
    assert checkpoint.tensors["model.transformer.wte.weight"].shape == (512, 32)
    assert checkpoint.dtype == "float32"
    assert checkpoint.parameters == sum(p.numel() for p in fs.load(folder, device="cpu").module.parameters())


def test_a_folder_without_a_config_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert load_error(tmp_path / "empty") == f"{tmp_path / 'empty'} has no config.json; give a checkpoint folder"


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "null", "\x00\x01", "[" * 100_000, ""])
def test_a_damaged_config_is_named(folder, content):
    (folder / "config.json").write_text(content)
    assert load_error(folder).startswith(f"{folder / 'config.json'} is damaged (")


def test_a_config_of_the_wrong_bytes_is_named(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x80")
    assert load_error(folder).startswith(f"{folder / 'config.json'} is damaged (")


def test_missing_settings_of_a_llada_config_are_named(folder):
    edit_json(folder / "config.json", d_model=None, rope_theta=None)
    assert load_error(folder) == f"{folder}: its config.json has no d_model"


@pytest.mark.parametrize(
    "changes",
    [
        {"d_model": "large"},
        {"d_model": -32},
        {"n_heads": 0},
        {"n_heads": 5},
        {"n_layers": 1.5},
        {"rms_norm_eps": "tiny"},
        {"rope_theta": "x"},
        {"d_model": 2**62},
        {"embedding_size": {}},
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(folder, changes):
    edit_json(folder / "config.json", **changes)
    assert load_error(folder).startswith(f"{folder}: ")


@pytest.mark.parametrize("layers", [10**4, 10**9, 10**30])
@pytest.mark.parametrize(("architecture", "field"), [("llada", "n_layers"), ("llama", "num_hidden_layers")])
def test_more_layers_than_tensors_are_refused_before_anything_is_built(tmp_path, architecture, field, layers):
    folder = write_tiny(tmp_path / "m", architecture)
    edit_json(folder / "config.json", **{field: layers})
    assert f"config.json has {layers} layers, but there are " in load_error(folder)


@pytest.mark.parametrize("architecture", ["llada", "llama", "bert"])
def test_a_vocabulary_beyond_the_weights_allocates_nothing(tmp_path, architecture):
    folder = write_tiny(tmp_path / "m", architecture)
    edit_json(
        folder / "config.json", vocab_size=2**40, **({"embedding_size": 2**40} if architecture == "llada" else {})
    )
    assert "needs (1099511627776, 32)" in load_error(folder)


def test_pickles_are_refused_with_the_reason_and_not_opened(folder, tmp_path):
    class Malicious:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))
    message = load_error(folder)
    assert message.startswith(
        f"{folder} holds pickled weights (pytorch_model.bin), and reading a pickle runs the code in it"
    )
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert load_error(folder).startswith(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def test_quantised_weights_are_refused_by_method(folder):
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq"})
    assert load_error(folder) == f"{folder} is quantised (awq), which is not supported; use the unquantised checkpoint"


def test_weights_of_an_unsupported_dtype_are_refused(tmp_path):
    folder = write_tiny(tmp_path / "m")
    change_weights(folder, lambda tensors: tensors.update({k: t.to(torch.int8) for k, t in tensors.items()}))
    message = "is stored as I8; supported are float32, bfloat16, float16 and float64"
    assert load_error(folder).startswith(f"{folder}: its tensor ")
    assert load_error(folder).endswith(message)


@pytest.mark.parametrize("size", [0, 4, 8, 100, 1000, -1])
def test_a_truncated_weight_file_is_named(folder, size):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert load_error(folder).startswith(f"{weights} is damaged (")


def test_a_header_with_a_wrong_length_is_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes((2**60).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert load_error(folder).startswith(f"{weights} is damaged (")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_shard_is_named(sharded, which):
    name = f"model-0000{which + 1}-of-00003.safetensors"
    (sharded / name).unlink()
    assert load_error(sharded) == f"{sharded} has no shard {name}; download it again"


def test_a_damaged_shard_is_named(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    assert load_error(sharded).startswith(f"{shard} is damaged (")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "a\\b.safetensors",
        "x.bin",
        "a\0.safetensors",
    ],
)
def test_an_index_that_points_outside_the_folder_is_refused(sharded, name):
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert (
        load_error(sharded) == f"{sharded / INDEX_FILE} points to {name!r}; only .safetensors files beside it are read"
    )


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}, []])
def test_an_index_without_a_map_is_damaged(sharded, index):
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert load_error(sharded).startswith(f"{sharded / INDEX_FILE} is damaged (")


def test_an_index_and_its_shards_must_agree(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    key = next(k for k, file in index["weight_map"].items() if file != "model-00003-of-00003.safetensors")
    index["weight_map"][key] = "model-00003-of-00003.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    problem = f"says that {key} is in model-00003-of-00003.safetensors, which is wrong; download both again"
    assert load_error(sharded) == f"{sharded / INDEX_FILE} {problem}"


def test_a_tensor_in_two_shards_is_refused(sharded):
    first, second = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    second.write_bytes(first.read_bytes())
    assert " is in both " in load_error(sharded)


def test_symbolic_links_of_the_hub_cache_are_followed(sharded, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(blobs / str(i))
    assert fs.load(sharded, device="cpu").spec.architecture == "llada"


# --- settings that a config must not control -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "kernels-community/malicious"},
        {"_attn_implementation": "kernels-community/malicious"},
        {"_attn_implementation_internal": "kernels-community/malicious"},
        {"transformers_weights": "../other.safetensors"},
        {"use_kernels": True},
        {"fusion_config": {"x": True}},
        {"auto_map": {"AutoModelForCausalLM": "malicious/repo--modeling.Model"}},
        {"output_attentions": True},
        {"dtype": "float16", "torch_dtype": "int8"},
    ],
    ids=str,
)
def test_only_settings_of_the_network_are_read(tmp_path, changes):
    folder = write_tiny(tmp_path / "m", "llama")
    edit_json(folder / "config.json", **changes)
    model = fs.load(folder, device="cpu")
    assert model.module.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    assert not model.spec.uses_remote_code


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_equal_folders_have_equal_fingerprints_and_others_do_not(tmp_path):
    a, b, c = (read_checkpoint(write_tiny(tmp_path / str(i), seed=s)).fingerprint for i, s in enumerate((0, 0, 1)))
    assert a == b != c


def test_a_fingerprint_depends_on_config_and_weights(folder):
    before = read_checkpoint(folder).fingerprint
    edit_json(folder / "config.json", rope_theta=10.0)
    changed = read_checkpoint(folder).fingerprint
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert len({before, changed, read_checkpoint(folder).fingerprint}) == 3


def test_the_fingerprint_of_a_large_file_depends_on_its_size_and_both_ends(tmp_path):
    file = tmp_path / "large.gguf"
    content = bytearray(8 << 20)
    file.write_bytes(content)
    before = fingerprint(file)
    fingerprints = {before}
    for offset in (0, 100, len(content) // 63, len(content) - 1):
        content[offset] = 1
        file.write_bytes(content)
        fingerprints.add(fingerprint(file))
        content[offset] = 0
    file.write_bytes(content + b"\0")
    fingerprints.add(fingerprint(file))
    assert len(fingerprints) == 6


# --- error messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]
)
def test_one_tensor_of_an_unsupported_dtype_is_named(folder, dtype):
    change_weights(
        folder, lambda t: t.update({"model.transformer.ln_f.weight": t["model.transformer.ln_f.weight"].to(dtype)})
    )
    assert "its tensor model.norm.weight is stored as " in load_error(folder)


def test_integer_buffers_are_not_weights(tmp_path):
    folder = write_tiny(tmp_path / "m", "bert")
    change_weights(folder, lambda tensors: tensors.update({"bert.embeddings.position_ids": torch.arange(128)[None]}))
    assert fs.load(folder, device="cpu").spec.architecture == "bert"


def test_a_tensor_that_would_be_overwritten_by_a_renamed_one_is_unexpected(folder):
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32)}))
    assert load_error(folder) == f"{folder}: missing tensors: none; unexpected tensors: model.norm.weight"


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("dream", {"tie_word_embeddings": True}),
        ("llada", {"weight_tying": True}),
    ],
)
def test_tied_weights_that_differ_are_refused(tmp_path, architecture, changes):
    folder = write_tiny(tmp_path / "m", architecture)
    edit_json(folder / "config.json", **changes)
    assert "ties lm_head.weight to model.embed_tokens.weight, but both are stored and differ" in load_error(folder)
    head, rows = {
        "llada": ("model.transformer.ff_out.weight", "model.transformer.wte.weight"),
    }.get(architecture, ("lm_head.weight", "model.embed_tokens.weight"))
    change_weights(folder, lambda tensors: tensors.update({head: tensors[rows].clone()}))
    assert fs.load(folder, device="cpu").spec.name == "m"


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llada", {"pad_token_id": 512}, "pad_token_id 512; expected a token id, 0 … 511"),
        ("llada", {"embedding_size": 0}, "vocab_size 0; expected at least 1"),
        ("dream", {"vocab_size": -1}, "vocab_size -1; expected at least 1"),
        ("bert", {"num_attention_heads": -1}, "num_attention_heads -1; expected at least 1"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type relative_key"),
        ("llada", {"quantization_config": {}}, "is quantised (unnamed)"),
        ("llada", {"quantization_config": "x\x1b[2J"}, "is quantised (x\\x1b[2J)"),
        ("llada", {"architectures": ["\x1b[31mname\n\u202e"]}, "unknown architecture \\x1b[31mname\\n\\u202e ("),
        ("llada", {"rope_theta": float("nan")}, "rope_theta nan; expected a number above 0"),
        ("dream", {"rope_theta": True}, "rope_theta True; expected a number above 0"),
        ("dream", {"rms_norm_eps": float("inf")}, "rms_norm_eps inf; expected a number above 0"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps 0.0; expected a number above 0"),
        ("llama", {"use_cache": "yes"}, "field 'use_cache': TypeError: "),
    ],
    ids=str,
)
def test_an_invalid_config_gives_one_printable_sentence(tmp_path, architecture, changes, message):
    folder = write_tiny(tmp_path / "m", architecture)
    edit_json(folder / "config.json", **changes)
    assert message in load_error(folder)
    assert load_error(folder).isprintable()


def test_settings_outside_the_network_are_ignored(tmp_path):
    folder = write_tiny(tmp_path / "m", "bert")
    edit_json(folder / "config.json", chunk_size_feed_forward=3, num_labels=10**12)
    assert fs.load(folder, device="cpu").spec.paradigm == "mdm"


def test_a_file_that_is_nested_too_deeply_is_an_error():
    with (
        pytest.raises(fs.UserError, match="m holds a file that is nested too deeply; download it again"),
        explain_read_errors("m"),
    ):
        raise RecursionError


def test_long_lists_of_tensors_are_shortened(folder):
    change_weights(folder, lambda tensors: tensors.update({f"k{i}": torch.zeros(1) for i in range(5000)}))
    assert load_error(folder).endswith(
        "unexpected tensors: k0, k1, k10, k100, k1000, k1001, k1002, k1003, and 4,992 more"
    )


@pytest.mark.parametrize("architecture", ["llada", "llama"])
def test_unknown_keys_of_a_known_architecture_do_not_suggest_remote_code(tmp_path, architecture):
    folder = write_tiny(tmp_path / "m", architecture)
    change_weights(folder, lambda tensors: [tensors.update({f"\x1b[31mx\n{k}": tensors.pop(k)}) for k in list(tensors)])
    message = load_error(folder)
    assert message.isprintable()
    assert "unknown architecture" not in message
    assert "trust_remote_code" not in message


def test_a_file_without_read_permission_is_an_error(folder, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert load_error(folder) == f"cannot read {folder / 'config.json'} (Permission denied)"


def test_a_file_name_that_is_too_long_gives_one_sentence(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = "x" * 300 + ".safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert "(File name too long)" in load_error(sharded)
