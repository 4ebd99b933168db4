"""Checkpoint folders, whole, damaged and hostile: each is read as it is or refused by name, before weights are read."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from folders import edit, spoil, tiny

import floatscope as fs
from floatscope.errors import guard_reading
from floatscope.models.files import INDEX, fingerprint, read_folder


def refused(folder) -> str:
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    said = str(error.value)
    assert "\n" not in said
    return said


@pytest.fixture
def folder(tmp_path):
    return tiny(tmp_path / "m")


@pytest.fixture
def sharded(tmp_path):
    return tiny(tmp_path / "s", shards=3)


def test_headers_tell_shapes_dtypes_and_parameters(folder):
    found = read_folder(folder)
    assert found.stored["model.transformer.wte.weight"].shape == (512, 32)
    assert found.dtype == "float32"
    assert found.parameters == sum(p.numel() for p in fs.load(folder, device="cpu").module.parameters())


def test_a_folder_without_a_config_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty") == f"{tmp_path / 'empty'} has no config.json; give a checkpoint folder"


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "null", "\x00\x01", "[" * 100_000, ""])
def test_a_damaged_config_is_named(folder, content):
    (folder / "config.json").write_text(content)
    assert refused(folder).startswith(f"{folder / 'config.json'} is damaged (")


def test_a_config_of_the_wrong_bytes_is_named(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x80")
    assert refused(folder).startswith(f"{folder / 'config.json'} is damaged (")


def test_a_llada_config_with_gaps_is_named(folder):
    edit(folder / "config.json", d_model=None, rope_theta=None)
    assert refused(folder) == f"{folder}: its config.json lacks d_model"


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
def test_sizes_that_describe_no_network_are_refused(folder, changes):
    edit(folder / "config.json", **changes)
    assert refused(folder).startswith(f"{folder}: ")


@pytest.mark.parametrize("layers", [10**4, 10**9, 10**30])
@pytest.mark.parametrize(("layout", "field"), [("llada", "n_layers"), ("llama", "num_hidden_layers")])
def test_more_layers_than_tensors_are_refused_before_anything_is_built(tmp_path, layout, field, layers):
    folder = tiny(tmp_path / "m", layout)
    edit(folder / "config.json", **{field: layers})
    assert f"config.json asks for {layers} layers, and there are " in refused(folder)


@pytest.mark.parametrize("layout", ["llada", "llama", "bert"])
def test_a_vocabulary_beyond_the_weights_allocates_nothing(tmp_path, layout):
    folder = tiny(tmp_path / "m", layout)
    edit(folder / "config.json", vocab_size=2**40, **({"embedding_size": 2**40} if layout == "llada" else {}))
    assert "asks for (1099511627776, 32)" in refused(folder)


def test_pickles_are_refused_with_the_reason_and_not_opened(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    said = refused(folder)
    assert said.startswith(
        f"{folder} holds pickled weights (pytorch_model.bin), and reading a pickle runs the code in it"
    )
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert refused(folder).startswith(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def test_quantised_weights_are_refused_by_method(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "awq"})
    assert refused(folder) == f"{folder} is quantised (awq), which is not offered; take the unquantised checkpoint"


def test_weights_of_another_kind_are_refused(tmp_path):
    folder = tiny(tmp_path / "m")
    spoil(folder, lambda tensors: tensors.update({k: t.to(torch.int8) for k, t in tensors.items()}))
    said = "is stored as I8; float32, bfloat16, float16 and float64 can be opened"
    assert refused(folder).startswith(f"{folder}: its tensor ")
    assert refused(folder).endswith(said)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 1000, -1])
def test_a_cut_weight_file_is_named(folder, cut):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    assert refused(folder).startswith(f"{weights} is damaged (")


def test_a_header_that_lies_is_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes((2**60).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert refused(folder).startswith(f"{weights} is damaged (")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_shard_is_named(sharded, which):
    name = f"model-0000{which + 1}-of-00003.safetensors"
    (sharded / name).unlink()
    assert refused(sharded) == f"{sharded} lacks its shard {name}; fetch it again"


def test_a_damaged_shard_is_named(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    assert refused(sharded).startswith(f"{shard} is damaged (")


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
def test_an_index_that_leads_elsewhere_is_refused(sharded, name):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (sharded / INDEX).write_text(json.dumps(index))
    assert refused(sharded) == f"{sharded / INDEX} points to {name!r}; only .safetensors files beside it are read"


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}, []])
def test_an_index_without_a_map_is_damaged(sharded, index):
    (sharded / INDEX).write_text(json.dumps(index))
    assert refused(sharded).startswith(f"{sharded / INDEX} is damaged (")


def test_an_index_and_its_shards_must_agree(sharded):
    index = json.loads((sharded / INDEX).read_text())
    key = next(iter(index["weight_map"]))
    index["weight_map"][key] = "model-00003-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    said = f"{sharded / INDEX} says that {key} is in model-00003-of-00003.safetensors, and it is not; fetch both again"
    assert refused(sharded) == said


def test_a_tensor_in_two_shards_is_refused(sharded):
    first, second = (sharded / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    second.write_bytes(first.read_bytes())
    assert " is in both " in refused(sharded)


def test_links_as_the_hubs_cache_has_them_are_followed(sharded, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(blobs / str(i))
    assert fs.load(sharded, device="cpu").spec.architecture == "llada"


# --- what a config may not do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "kernels-community/evil"},
        {"_attn_implementation": "kernels-community/evil"},
        {"_attn_implementation_internal": "kernels-community/evil"},
        {"transformers_weights": "../other.safetensors"},
        {"use_kernels": True},
        {"fusion_config": {"x": True}},
        {"auto_map": {"AutoModelForCausalLM": "evil/repo--modeling.Evil"}},
        {"output_attentions": True},
        {"dtype": "float16", "torch_dtype": "int8"},
    ],
    ids=str,
)
def test_a_config_asks_for_nothing_but_its_network(tmp_path, changes):
    folder = tiny(tmp_path / "m", "llama")
    edit(folder / "config.json", **changes)
    model = fs.load(folder, device="cpu")
    assert model.module.config._attn_implementation == "sdpa"
    assert model.dtype == torch.float32
    assert not model.spec.remote_code


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_equal_folders_have_equal_fingerprints_and_others_do_not(tmp_path):
    a, b, c = (read_folder(tiny(tmp_path / str(i), seed=s)).fingerprint for i, s in enumerate((0, 0, 1)))
    assert a == b != c


def test_a_fingerprint_sees_config_names_and_weights(folder):
    before = read_folder(folder).fingerprint
    edit(folder / "config.json", rope_theta=10.0)
    changed = read_folder(folder).fingerprint
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert len({before, changed, read_folder(folder).fingerprint}) == 3


def test_a_large_file_is_sampled_and_its_size_and_ends_count(tmp_path):
    file = tmp_path / "large.gguf"
    content = bytearray(8 << 20)
    file.write_bytes(content)
    before = fingerprint(file)
    seen = {before}
    for place in (0, 100, len(content) // 63, len(content) - 1):
        content[place] = 1
        file.write_bytes(content)
        seen.add(fingerprint(file))
        content[place] = 0
    file.write_bytes(content + b"\0")
    seen.add(fingerprint(file))
    assert len(seen) == 6


# --- sentences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]
)
def test_one_tensor_of_another_kind_is_named(folder, dtype):
    spoil(folder, lambda t: t.update({"model.transformer.ln_f.weight": t["model.transformer.ln_f.weight"].to(dtype)}))
    assert "its tensor model.norm.weight is stored as " in refused(folder)


def test_buffers_of_whole_numbers_are_no_weights(tmp_path):
    folder = tiny(tmp_path / "m", "bert")
    spoil(folder, lambda tensors: tensors.update({"bert.embeddings.position_ids": torch.arange(128)[None]}))
    assert fs.load(folder, device="cpu").spec.architecture == "bert"


def test_a_tensor_that_would_be_overwritten_by_a_renamed_one_is_unexpected(folder):
    spoil(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32)}))
    assert refused(folder) == f"{folder}: missing tensors: none; unexpected tensors: model.norm.weight"


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("dream", {"tie_word_embeddings": True}),
        ("llada", {"weight_tying": True}),
    ],
)
def test_tied_weights_that_differ_are_refused(tmp_path, layout, changes):
    folder = tiny(tmp_path / "m", layout)
    edit(folder / "config.json", **changes)
    assert "ties lm_head.weight to model.embed_tokens.weight, and both are stored and differ" in refused(folder)
    head, rows = {
        "llada": ("model.transformer.ff_out.weight", "model.transformer.wte.weight"),
    }.get(layout, ("lm_head.weight", "model.embed_tokens.weight"))
    spoil(folder, lambda tensors: tensors.update({head: tensors[rows].clone()}))
    assert fs.load(folder, device="cpu").spec.name == "m"


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("llada", {"pad_token_id": 512}, "pad_token_id 512, and its token ids are 0 … 511"),
        ("llada", {"embedding_size": 0}, "vocab_size 0, which must be at least 1"),
        ("dream", {"vocab_size": -1}, "vocab_size -1, which must be at least 1"),
        ("bert", {"num_attention_heads": -1}, "num_attention_heads -1, which must be at least 1"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type relative_key"),
        ("llada", {"quantization_config": {}}, "is quantised (unnamed)"),
        ("llada", {"quantization_config": "x\x1b[2J"}, "is quantised (x\\x1b[2J)"),
        ("llada", {"architectures": ["\x1b[31mevil\n\u202e"]}, "unknown architecture \\x1b[31mevil\\n\\u202e ("),
        ("llada", {"rope_theta": float("nan")}, "rope_theta nan, which must be a number above 0"),
        ("dream", {"rope_theta": True}, "rope_theta True, which must be a number above 0"),
        ("dream", {"rms_norm_eps": float("inf")}, "rms_norm_eps inf, which must be a number above 0"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps 0.0, which must be a number above 0"),
        ("llama", {"use_cache": "yes"}, "field 'use_cache': TypeError: "),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_meant_is_one_printable_sentence(tmp_path, layout, changes, said):
    folder = tiny(tmp_path / "m", layout)
    edit(folder / "config.json", **changes)
    assert said in refused(folder)
    assert refused(folder).isprintable()


def test_what_is_not_of_the_network_is_left_aside(tmp_path):
    folder = tiny(tmp_path / "m", "bert")
    edit(folder / "config.json", chunk_size_feed_forward=3, num_labels=10**12)
    assert fs.load(folder, device="cpu").spec.paradigm == "mdm"


def test_a_file_that_is_nested_too_deeply_is_said():
    with (
        pytest.raises(fs.UserError, match="m holds a file that is nested too deeply; fetch it again"),
        guard_reading("m"),
    ):
        raise RecursionError


def test_many_tensors_are_not_all_listed(folder):
    spoil(folder, lambda tensors: tensors.update({f"k{i}": torch.zeros(1) for i in range(5000)}))
    assert refused(folder).endswith("unexpected tensors: k0, k1, k10, k100, k1000, k1001, k1002, k1003, and 4,992 more")


@pytest.mark.parametrize("layout", ["llada", "llama"])
def test_strange_keys_of_a_known_architecture_do_not_lead_to_foreign_code(tmp_path, layout):
    folder = tiny(tmp_path / "m", layout)
    spoil(folder, lambda tensors: [tensors.update({f"\x1b[31mx\n{k}": tensors.pop(k)}) for k in list(tensors)])
    said = refused(folder)
    assert said.isprintable()
    assert "unknown architecture" not in said
    assert "trust_remote_code" not in said


def test_a_file_that_may_not_be_read_is_said_so(folder, monkeypatch):
    def locked(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.read_bytes", locked)
    assert refused(folder) == f"{folder / 'config.json'} cannot be read (Permission denied)"


def test_an_index_that_names_too_long_a_file_is_one_sentence(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = "x" * 300 + ".safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    assert "cannot be read (File name too long)" in refused(sharded)
