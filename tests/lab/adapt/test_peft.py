"""PEFT's format: peft opens what floatscope writes, and floatscope opens the plain LoRA that peft writes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from perturbed_adapters import compute_logits, write_perturbed_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from floatscope.errors import UserError
from floatscope.models.description import describe
from floatscope.models.loader import load
from floatscope.models.names import split_adapter
from floatscope.models.random_checkpoints import write_random

IDS = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(0))
IDS[:, ::4] = 7  # the mask, or a token with a trained embedding


@pytest.fixture(scope="module")
def bases(base, tmp_path_factory):
    """Bases with an untied output, with a tied output, and with transposed matrices."""
    folder = tmp_path_factory.mktemp("bases")
    tied = write_random(folder / "tied", "llama", layers=2, heads=4, kv_heads=2)
    config = json.loads((tied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tied / "config.json").write_text(json.dumps(config))
    tensors = load_file(tied / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tied / "model.safetensors", {"format": "pt"})
    special = {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    module = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50, **special))
    module.save_pretrained(folder / "transposed")
    return {"untied": base, "tied": tied, "transposed": folder / "transposed"}


def assert_equal_to_float32_rounding(ours, theirs) -> None:
    assert (ours - theirs).abs().max() <= 100 * torch.finfo(torch.float32).eps * theirs.abs().max()


def write_with_peft(folder, base, config, seed=0):
    """Write an adapter with random weights by peft; return its logits."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape, generator=rng)
    model.save_pretrained(folder, save_embedding_layers=False)
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", ["untied", "tied", "transposed"])
def test_peft_opens_an_adapter_and_computes_the_same_logits(bases, tmp_path, name):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", bases[name])
    ours = compute_logits(load(f"{bases[name]}+{folder}").module, IDS)
    plain = AutoModelForCausalLM.from_pretrained(bases[name])
    before = compute_logits(plain, IDS)
    theirs = compute_logits(PeftModel.from_pretrained(plain, folder), IDS)
    assert_equal_to_float32_rounding(ours, theirs)
    assert (ours - before).abs().max() > 0.1


PLAIN_LORA = {
    "some layers": {"target_modules": ["q_proj", "up_proj"], "lora_alpha": 12},
    "all layers": {"target_modules": "all-linear", "lora_alpha": 5},
    "one of the layers": {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]},
    "output": {"target_modules": ["lm_head", "v_proj"]},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True, "lora_alpha": 4, "lora_dropout": 0.5},
    "patterns": {
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 5, "layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 9},
    },
    "tokens": {"target_modules": ["k_proj"], "trainable_token_indices": [9, 7], "init_lora_weights": "gaussian"},
    "tokens by layer": {"target_modules": ["k_proj"], "trainable_token_indices": {"embed_tokens": [7]}},
}


@pytest.mark.parametrize("settings", PLAIN_LORA.values(), ids=PLAIN_LORA)
def test_plain_lora_of_peft_opens_with_the_same_logits(base, tmp_path, settings):
    theirs = write_with_peft(tmp_path / "lora", base, LoraConfig(**{"r": 3, **settings}))
    model = load(f"{base}+{tmp_path / 'lora'}")
    with torch.inference_mode():
        ours = model.module(input_ids=IDS, use_cache=False).logits
    assert_equal_to_float32_rounding(ours, theirs)
    assert (model.spec.name, model.spec.paradigm, model.spec.architecture) == ("base+lora", "arm", "causal")
    assert model.spec.weights != load(base).spec.weights


@pytest.mark.parametrize("name", ["tied", "transposed"])
def test_plain_lora_of_other_bases_opens_with_the_same_logits(bases, tmp_path, name):
    config = LoraConfig(
        r=3,
        target_modules=["c_attn"] if name == "transposed" else ["q_proj"],
        trainable_token_indices=[7],
        fan_in_fan_out=name == "transposed",
    )
    theirs = write_with_peft(tmp_path / "lora", bases[name], config)
    with torch.inference_mode():
        ours = load(f"{bases[name]}+{tmp_path / 'lora'}").module(input_ids=IDS, use_cache=False).logits
    assert_equal_to_float32_rounding(ours, theirs)


def test_lora_of_a_masked_diffusion_model_has_the_names_of_its_own_code(tmp_path):
    base = write_random(tmp_path / "llada", "llada", layers=2)
    names = [f"model.transformer.blocks.{i}.{part}" for i in (0, 1) for part in ("q_proj", "attn_out")]
    rng = torch.Generator().manual_seed(0)
    width = load(base).module.config.hidden_size
    tensors = {}
    for name in names:
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, width, generator=rng)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(width, 2, generator=rng)
    write_files(tmp_path / "lora", tensors, {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "attn_out"]})
    plain, adapted = load(base), load(f"{base}+{tmp_path / 'lora'}")
    assert (adapted.spec.paradigm, adapted.spec.mask_id) == ("mdm", plain.spec.mask_id)
    assert adapted.spec.architecture == "llada"
    change = (
        2
        * tensors[f"base_model.model.{names[1]}.lora_B.weight"]
        @ (tensors[f"base_model.model.{names[1]}.lora_A.weight"])
    )
    weights = [m.module.model.layers[0].self_attn.o_proj.weight for m in (plain, adapted)]
    torch.testing.assert_close(weights[1], weights[0] + change)
    assert describe(f"{base}+{tmp_path / 'lora'}").spec.paradigm == "mdm"


def write_files(folder, tensors, settings) -> None:
    """Write adapter files by hand."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))


MERGE = r"merge it into its base with peft"
REFUSED = {
    "dora": (LoraConfig(target_modules=["q_proj"], use_dora=True), rf"sets use_dora, .*scales the rows.*{MERGE}"),
    "modules": (
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        r"modules_to_save.*complete",
    ),
    "bias": (LoraConfig(target_modules=["q_proj"], bias="all"), r"sets bias, .*changes biases"),
    "pissa": (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), r"to pissa, which changes the base"),
    "embedding": (LoraConfig(target_modules=["embed_tokens"]), rf"plain LoRA does not have: .*lora_embedding.*{MERGE}"),
    "other method": (IA3Config(target_modules=["v_proj"], feedforward_modules=[]), r"of the method IA3; only LORA"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_plain_lora_is_refused_with_the_reason(base, tmp_path, config, message):
    write_with_peft(tmp_path / "lora", base, config)
    with pytest.raises(UserError, match=message):
        load(f"{base}+{tmp_path / 'lora'}")


def test_lora_of_a_tied_output_is_refused(bases, tmp_path):
    write_with_peft(tmp_path / "lora", bases["tied"], LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(UserError, match=rf"changes lm_head, which shares its weights with the embedding.*{MERGE}"):
        load(f"{bases['tied']}+{tmp_path / 'lora'}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": None}, r"of the method None; only LORA can be applied"),
        ({"use_newest_idea": 1}, r"sets use_newest_idea, which cannot be applied \(it is not part of plain LoRA\)"),
        ({"r": True}, r"Expected 'int', got 'bool' - in 'r'\); download it again"),
        ({"r": 4}, r"lora_A.weight is \(3, \d+\), not of rank 4"),
        ({"lora_alpha": float("nan")}, r"Expected 'float' > -1e\+30 - in 'lora_alpha'"),
        ({"lora_alpha": "8"}, r"Expected 'float', got 'str' - in 'lora_alpha'"),
        ({"use_rslora": "yes"}, r"Expected 'bool', got 'str' - in 'use_rslora'"),
        ({"rank_pattern": {"(a+)+$": 3}}, r"Expected 'str' matching regex .* in 'rank_pattern'"),
        ({"alpha_pattern": [1]}, r"Expected 'object', got 'array' - in 'alpha_pattern'"),
        ({"trainable_token_indices": [7, 7]}, r"different ids of one embedding in 'trainable_token_indices'"),
        ({"trainable_token_indices": {"a": [1], "b": [2]}}, r"ids of one embedding in 'trainable_token_indices'"),
        ({"trainable_token_indices": [7]}, r"has no model\.embed_tokens\.token_adapter"),
    ],
)
def test_damaged_config_is_refused(base, tmp_path, settings, message):
    write_with_peft(tmp_path / "lora", base, LoraConfig(r=3, target_modules=["q_proj"]))
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UserError, match=message):
        load(f"{base}+{tmp_path / 'lora'}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.1.self_attn.q_proj.lora_B.weight": None}, r"has no model\.layers\.1\.self_attn\.q_proj\.lora_B"),
        ({"layers.1.self_attn.q_proj.lora_A.weight": (3, 5)}, r"does not fit model\.layers\.1\.self_attn\.q_proj"),
        ({"layers.9.self_attn.q_proj.lora_A.weight": (3, 64)}, r"weights the base does not have: model\.layers\.9"),
        ({"layers.0.input_layernorm.lora_A.weight": (3, 64)}, r"weights the base does not have: .*layernorm"),
        (
            {"embed_tokens.token_adapter.trainable_tokens_delta": (1, 64)},
            r"has unexpected tensors: model",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(base, tmp_path, changes, message):
    write_with_peft(tmp_path / "lora", base, LoraConfig(r=3, target_modules=["q_proj"]))
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    for name, shape in changes.items():
        key = f"base_model.model.model.{name}"
        tensors[key] = torch.zeros(shape or 1)
        if shape is None:
            del tensors[key]
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=message):
        load(f"{base}+{tmp_path / 'lora'}")


def test_token_beyond_the_vocabulary_is_refused(base, tmp_path):
    rows = load_file(base / "model.safetensors")["model.embed_tokens.weight"].shape
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    write_files(tmp_path / "lora", {name: torch.zeros(1, rows[1])}, {"trainable_token_indices": [rows[0]]})
    with pytest.raises(UserError, match=rf"replaces the embedding of token {rows[0]}; the base has {rows[0]}"):
        load(f"{base}+{tmp_path / 'lora'}")


def test_pickled_adapter_is_refused(base, tmp_path):
    write_with_peft(tmp_path / "lora", base, LoraConfig(target_modules=["q_proj"]))
    (tmp_path / "lora" / "adapter_model.safetensors").rename(tmp_path / "lora" / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model.bin is a pickle, and reading a pickle runs the code in it"):
        load(f"{base}+{tmp_path / 'lora'}")


@pytest.mark.parametrize("file", ["adapter.json", "adapter_config.json"])
def test_folder_of_floatscope_needs_both_json_files(base, tmp_path, file):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", base)
    (folder / file).unlink()
    with pytest.raises(UserError, match=rf"{file} is missing; download it again"):
        load(f"{base}+{folder}")


def test_lora_folder_is_found_in_a_name(tmp_path):
    write_files(tmp_path / "a+lora", {}, {})
    assert split_adapter(f"org/name+{tmp_path / 'a+lora'}") == ("org/name", tmp_path / "a+lora")


def write_as_old_version(folder, base) -> None:
    """Rewrite an adapter with the file and the names of floatscope 0.6."""
    module, tensors = load(base).module, load_file(folder / "adapter_model.safetensors")
    old = {}
    for key, tensor in tensors.items():
        layer, _, part = key.removeprefix("base_model.model.").rpartition(".lora_")
        if not layer:
            old["mask_embedding"] = tensor[0]
        elif isinstance(module.get_submodule(layer), torch.nn.Linear):
            old[f"{layer}.weight.{'up' if part == 'B.weight' else 'down'}"] = tensor
        else:
            old[f"{layer}.weight.{'down' if part == 'B.weight' else 'up'}"] = tensor.T.contiguous()
    save_file(old, folder / "adapter.safetensors", {"format": "pt"})
    from floatscope.files.digests import sha256_file

    facts = json.loads((folder / "adapter.json").read_text()) | {"sha256": sha256_file(folder / "adapter.safetensors")}
    (folder / "adapter.json").write_text(json.dumps(facts))
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).unlink()


@pytest.mark.parametrize("name", ["untied", "transposed"])
def test_adapter_of_version_06_opens_with_the_same_weights(bases, tmp_path, name):
    folder, _ = write_perturbed_adapter(tmp_path / "sibling", bases[name])
    new = load(f"{bases[name]}+{folder}").module.state_dict()
    write_as_old_version(shutil.copytree(folder, tmp_path / "old"), bases[name])
    old = load(f"{bases[name]}+{tmp_path / 'old'}").module.state_dict()
    assert all(torch.equal(old[key], weight) for key, weight in new.items())
