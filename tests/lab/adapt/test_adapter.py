"""Adapters: base plus adapter equals the merged model, and an adapter that does not fit is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil

import pytest
import torch
from perturbed_adapters import compute_logits, perturb, write_perturbed_adapter
from safetensors.torch import load_file, save_file
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import floatscope as fs
from floatscope.canvas import CanvasState
from floatscope.errors import UserError
from floatscope.lab.adapt.lora import adapter_tensors, make_trainable
from floatscope.models.adapter import Adapter, sha256_weights
from floatscope.models.adapter_merge import linear_layers, merge_adapter
from floatscope.models.description import describe
from floatscope.models.loader import load
from floatscope.models.names import split_adapter
from floatscope.models.peft_format import MODEL_FILE
from floatscope.models.random_checkpoints import write_random
from floatscope.schema import State


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base_folder(request, base, tmp_path):
    """Return a base with an untied output, or with the embedding tied to it."""
    if request.param:
        base = shutil.copytree(base, tmp_path / "tied")
        config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
        (base / "config.json").write_text(json.dumps(config))
        tensors = load_file(base / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, base / "model.safetensors", {"format": "pt"})
    return base


@pytest.mark.parametrize("rank", [1, 5, None])
@pytest.mark.parametrize("mask", [7, "new"])
def test_base_plus_adapter_equals_the_merged_model(base_folder, rank, mask):
    model, plain = load(base_folder), load(base_folder)
    mask_id = model.vocab_size if mask == "new" else mask
    module = perturb(model, mask_id, rank)
    merge_adapter(plain.module, Adapter("", "", mask_id, None, rank, adapter_tensors(module, torch.float32)))
    ids = torch.randint(0, plain.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))
    ids[:, ::3] = mask_id
    torch.testing.assert_close(compute_logits(plain.module, ids), compute_logits(module, ids), rtol=1e-5, atol=1e-5)


def test_initial_adapter_changes_the_mask_only(base_folder):
    model, plain = load(base_folder), load(base_folder)
    make_trainable(model.module, 7, 4)
    ids = torch.arange(20, 40)[None]
    after, before = compute_logits(model.module, ids), compute_logits(plain.module, ids)
    others = [i for i in range(plain.vocab_size) if i != 7]
    torch.testing.assert_close(after[..., others], before[..., others])
    row = model.module.get_input_embeddings().row
    torch.testing.assert_close(row, plain.module.get_input_embeddings().weight.mean(0))


def test_every_linear_layer_is_trained_and_the_base_is_not(base):
    model = load(base)
    names = [name for name, _ in linear_layers(model.module)]
    assert len(names) == 2 * 7  # q, k, v, o, gate, up, down of two layers; not the output
    make_trainable(model.module, 7, 3)
    model.module(input_ids=torch.tensor([[7, 20, 30]]), is_causal=False).logits.square().mean().backward()
    with_gradient = {name for name, p in model.module.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in model.module.named_parameters() if p.requires_grad}
    assert len(with_gradient) == 2 * len(names) + 1
    assert not any(".base." in name for name in with_gradient)


MASK_ROW = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


def replace_tensors(folder, tensors) -> None:
    """Replace the tensors of an adapter, and their digest."""
    save_file(tensors, folder / MODEL_FILE)
    sha256 = hashlib.sha256((folder / MODEL_FILE).read_bytes()).hexdigest()
    about = json.loads((folder / "adapter.json").read_text()) | {"sha256": sha256}
    (folder / "adapter.json").write_text(json.dumps(about))


def test_load_opens_a_base_with_its_adapter(base, tmp_path):
    folder, module = write_perturbed_adapter(tmp_path / "sibling", base)
    model = load(f"{base}+{folder}")
    assert model.spec.name == "base+sibling"
    assert (model.spec.paradigm, model.spec.mask_id, model.spec.shift, model.spec.architecture) == (
        "mdm",
        7,
        True,
        "adapted",
    )
    ids = torch.arange(20, 40)[None]
    canvas = CanvasState(ids, torch.full_like(ids, int(State.PROMPT)))
    torch.testing.assert_close(model.forward(canvas), compute_logits(module, ids), rtol=1e-5, atol=1e-5)
    assert model.spec.weights not in (load(base).spec.weights, load(base, mask_id=7).spec.weights)
    assert describe(f"{base}+{folder}").spec.mask_id == 7


def test_adapted_model_decodes_and_is_traced_like_any_mdm(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    model = load(f"{base}+{folder}")
    decoding = fs.decode(model, [20, 30, 40], new_tokens=6, watch=fs.Watch(), seed=0)
    assert decoding.tokens.shape == (1, 3 + 6)
    assert 7 not in decoding.tokens[0]
    (trace,) = decoding.traces
    assert trace.received().shape[:2] == (6, 2)


def test_another_base_is_refused(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    other = write_random(tmp_path / "other", "llama", seed=1, layers=2, heads=4, kv_heads=2)
    with pytest.raises(UserError, match=r"belongs to base with sha256 \w{12}…, and .*other has \w{12}…; give the base"):
        load(f"{other}+{folder}")


def test_base_of_another_shape_is_refused_with_the_weight(base, tmp_path):
    other = write_random(tmp_path / "other", "llama", layers=2, heads=4, kv_heads=2, ffn=96)
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base, base_sha256=sha256_weights(other))
    with pytest.raises(UserError, match=r"does not fit model.layers.0.mlp.down_proj.weight"):
        load(f"{other}+{folder}")
    shallow = write_random(tmp_path / "shallow", "llama", layers=1, heads=4, kv_heads=2)
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base, base_sha256=sha256_weights(shallow))
    with pytest.raises(UserError, match=r"weights the base does not have: model\.layers\.1\."):
        load(f"{shallow}+{folder}")


def test_tensors_of_another_adapter_are_refused(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    other, _ = write_perturbed_adapter(tmp_path / "other", base, mask_token="y")
    tensors = load_file(other / MODEL_FILE)
    tensors[MASK_ROW] += 1
    save_file(tensors, folder / MODEL_FILE)
    with pytest.raises(UserError, match=r"does not have the digest in adapter\.json; copy both files again"):
        load(f"{base}+{folder}")


def test_missing_folder_or_parent_folder_is_a_user_error(base, tmp_path):
    write_perturbed_adapter(tmp_path / "sibling" / "adapter", base)
    with pytest.raises(UserError, match=r"nowhere does not exist; give a folder that .* or peft wrote$"):
        load(f"{base}+{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match=r"it has no adapter\.json; .* wrote, such as .*sibling/adapter$"):
        load(f"{base}+{tmp_path / 'sibling'}")
    assert load(f"{base}+{tmp_path / 'sibling' / 'adapter'}").spec.name == "base+sibling/adapter"


def test_adapter_without_base_is_refused(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"peft is an adapter; open it with its base: BASE\+"):
        fs.load(tmp_path / "peft")
    with pytest.raises(UserError, match=r"is an adapter; open it with its base: BASE\+"):
        load(folder)
    with pytest.raises(UserError, match=r"is not an adapter: it has no adapter.json"):
        load(f"{base}+{base}")
    with pytest.raises(UserError, match=r"leave out mask_id=, shift= and block_size="):
        load(f"{base}+{folder}", mask_id=3)


ABOUT = '{"base_name": "", "base_sha256": "", "mask_id": 7, "mask_token": null, "rank": 3, "sha256": ""}'


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter.json", "{", "is damaged"),
        ("adapter.json", '{"base_name": "x"}', "missing required field 'base_sha256'"),
        ("adapter.json", ABOUT.replace("7", "true"), "Expected 'int | null', got 'bool' - in 'mask_id'"),
        (MODEL_FILE, "short", "missing or damaged"),
    ],
)
def test_damaged_adapter_is_a_user_error(base, tmp_path, file, content, message):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=message):
        load(f"{base}+{folder}")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            [MASK_ROW],
            r"its adapter has no model\.embed_tokens\.token_adapter\.trainable_tokens_delta; download",
        ),
        (
            ["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"],
            r"has no model\.layers\.1\.mlp\.up_proj\.lora_B\.weight; download",
        ),
        (None, r"its adapter has no model\.layers\.0\."),
    ],
)
def test_missing_tensor_is_refused_by_name(base, tmp_path, missing, message):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    tensors = load_file(folder / MODEL_FILE)
    names = {MASK_ROW} if missing is None else tensors.keys() - missing
    replace_tensors(folder, {name: tensors[name] for name in names})
    with pytest.raises(UserError, match=message):
        load(f"{base}+{folder}")


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("adapter.json", {"rank": 77}),
        ("adapter.json", {"rank": None}),
        ("adapter.json", {"mask_id": None}),
        ("adapter.json", {"mask_id": 8}),
        ("adapter_config.json", {"r": 77}),
        ("adapter_config.json", {"lora_alpha": 2}),
        ("adapter_config.json", {"use_rslora": True}),
        ("adapter_config.json", {"alpha_pattern": {"up_proj": 9}}),
        ("adapter_config.json", {"trainable_token_indices": [8]}),
        ("adapter_config.json", {"trainable_token_indices": None}),
    ],
)
def test_both_json_files_must_match(base, tmp_path, file, changes):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    about = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"adapter_config\.json does not match adapter\.json in its rank"):
        load(f"{base}+{folder}")


def test_values_that_are_not_finite_are_refused(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    tensors = load_file(folder / MODEL_FILE)
    tensors[MASK_ROW][0, 3] = torch.nan
    replace_tensors(folder, tensors)
    with pytest.raises(UserError, match=r"damaged \(base_model\S+trainable_tokens_delta is not finite\)"):
        load(f"{base}+{folder}")


def test_mask_id_beyond_the_vocabulary_is_refused(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base, mask_id=100_000)
    with pytest.raises(UserError, match="mask id 100000 is not a valid token id"):
        load(f"{base}+{folder}")


def test_digest_of_one_file_is_what_sha256sum_prints(base, tmp_path):
    assert sha256_weights(base) == hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    several = write_random(tmp_path / "several", "llama", shards=3)
    assert sha256_weights(several) != sha256_weights(write_random(tmp_path / "others", "llama", shards=3, seed=1))


def test_folder_may_have_a_plus_in_its_name(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "a+b" / "sibling+1", base)
    assert load(f"{base}+{folder}").spec.name == "base+sibling+1"


def test_fetched_base_opens_with_any_adapter(base, tmp_path):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    assert split_adapter(f"smollm2:arm+{folder}") == ("smollm2:arm", folder)


def test_base_is_checked_at_the_opened_revision(base, tmp_path, monkeypatch):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    revisions = []

    def find_checkpoint(name, revision=None, **_):
        revisions.append(revision)
        return base, None

    for module in ("names", "loader"):
        monkeypatch.setattr(f"floatscope.models.{module}.find_checkpoint", find_checkpoint)
    load(f"org/name+{folder}", revision="abc")
    assert revisions == ["abc", "abc"]


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "make",
    [
        lambda: GemmaForCausalLM(GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8, vocab_size=50)),  # scales
        lambda: PhiForCausalLM(PhiConfig(**SIZES, vocab_size=50, tie_word_embeddings=True)),  # an output with a bias
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50)),  # matrices turned
    ],
)
def test_base_plus_adapter_equals_the_merged_model_of_other_architectures(make):
    torch.manual_seed(0)
    module = make().eval()
    with torch.no_grad():
        for p in module.parameters():
            p += 0.1 * torch.randn(p.shape)
    plain = copy.deepcopy(module)
    make_trainable(module, 7, 3)
    with torch.no_grad():
        for p in (p for p in module.parameters() if p.requires_grad):
            p += 0.1 * torch.randn(p.shape)
    merge_adapter(plain, Adapter("", "", 7, None, 3, adapter_tensors(module, torch.float32)))
    ids = torch.arange(20)[None]
    torch.testing.assert_close(compute_logits(plain, ids), compute_logits(module, ids), rtol=1e-5, atol=1e-5)


def test_base_that_keeps_its_causal_mask_is_refused(tmp_path):
    GPTJForCausalLM(GPTJConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=50, rotary_dim=4)).save_pretrained(
        tmp_path / "base"
    )
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", tmp_path / "base")
    with pytest.raises(UserError, match=r"keeps its causal mask .*; an adapter cannot change that"):
        load(f"{tmp_path / 'base'}+{folder}")


@pytest.mark.parametrize("size", [1, 3])
def test_embedding_of_another_size_is_refused(base, tmp_path, size):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    replace_tensors(folder, load_file(folder / MODEL_FILE) | {MASK_ROW: torch.zeros(1, size)})
    with pytest.raises(UserError, match="its adapter's token rows do not fit an embedding of"):
        load(f"{base}+{folder}")
