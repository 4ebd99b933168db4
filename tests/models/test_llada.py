"""LLaDA's layout: its keys renamed make a Llama called without the causal mask, and nothing is lost on the way."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import floatscope as fs
from floatscope.decode import canvas_of
from floatscope.models.llada import LAYER_KEYS, MODEL_KEYS, llama_key

TINY = {"n_layers": 2, "d_model": 32, "n_kv_heads": 2, "mlp_hidden_size": 48, "embedding_size": 64}


@pytest.fixture
def folder(tmp_path):
    return fs.write_random_llada(tmp_path / "tiny", seed=3, **TINY)


def rewritten(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_every_key_of_the_layout_is_renamed_and_none_twice(folder):
    keys = list(load_file(folder / "model.safetensors"))
    assert len(keys) == len(MODEL_KEYS) + 2 * len(LAYER_KEYS)
    assert "model.transformer.blocks.1.attn_out.weight" in keys
    renamed = [llama_key(key) for key in keys]
    assert len(set(renamed)) == len(keys)
    assert set(renamed) == set(fs.open_llada(folder).module.state_dict())


def test_a_key_of_another_layout_is_none():
    for key in ("model.layers.0.self_attn.q_proj.weight", "model.transformer.blocks.x.q_proj.weight", "lm_head.weight"):
        assert llama_key(key) is None


def test_what_is_written_is_what_is_opened(folder):
    model = fs.open_llada(folder)
    stored = load_file(folder / "model.safetensors")
    opened = model.module.state_dict()
    for key, tensor in stored.items():
        assert torch.equal(opened[llama_key(key)], tensor)
    assert not model.module.training
    assert (model.spec.family, model.spec.mask_id, model.spec.eos_id, model.spec.shift) == ("mdm", 63, 62, False)


def test_the_seed_makes_the_weights_and_leaves_the_global_state_alone(tmp_path):
    before = torch.random.get_rng_state()
    a, b, c = (fs.write_random_llada(tmp_path / str(i), seed=s, **TINY) for i, s in enumerate((0, 0, 1)))
    assert torch.equal(torch.random.get_rng_state(), before)
    first, again, other = (load_file(f / "model.safetensors") for f in (a, b, c))
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not any(torch.equal(first[k], other[k]) for k in first if "proj" in k)


def test_every_position_sees_every_other(llada):
    canvas = canvas_of([[1, 2, 3, 4]], 4, 63)
    with torch.no_grad():
        before = llada.forward(canvas)
        canvas.tokens[0, -1] = 5
        assert ((llada.forward(canvas) - before).abs().amax(-1) > 1e-4).all()


def test_left_padding_changes_no_logits(llada):
    alone, batch = canvas_of([[1, 2]], 3, 63), canvas_of([[1, 2], [5, 6, 7, 8, 9]], 3, 63)
    with torch.no_grad():
        torch.testing.assert_close(llada.forward(batch)[0, 3:], llada.forward(alone)[0], rtol=1e-4, atol=1e-4)


def test_missing_and_unexpected_tensors_are_listed(folder):
    def change(tensors):
        tensors["model.transformer.blocks.0.surprise.weight"] = tensors.pop("model.transformer.ln_f.weight")

    rewritten(folder, change)
    with pytest.raises(fs.UserError) as error:
        fs.open_llada(folder)
    assert "missing tensors ['model.norm.weight']" in str(error.value)
    assert "unexpected tensors ['model.transformer.blocks.0.surprise.weight']" in str(error.value)


def test_a_layer_too_many_is_unexpected(folder):
    key = "model.transformer.blocks.{}.attn_out.weight"
    rewritten(folder, lambda tensors: tensors.update({key.format(9): tensors[key.format(0)].clone()}))
    with pytest.raises(
        fs.UserError, match=r"missing tensors none, unexpected .*model\.layers\.9\.self_attn\.o_proj\.weight"
    ):
        fs.open_llada(folder)


def test_a_tensor_of_another_shape_is_named(folder):
    key = "model.transformer.blocks.1.attn_out.weight"
    rewritten(folder, lambda tensors: tensors.update({key: tensors[key][:, :8].clone()}))
    with pytest.raises(
        fs.UserError, match=r"layers\.1\.self_attn\.o_proj\.weight is \(32, 8\), .* asks for \(32, 32\)"
    ):
        fs.open_llada(folder)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, folder):
    with pytest.raises(fs.UserError, match=r"has no config\.json; give a checkpoint folder"):
        fs.open_llada(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(fs.UserError, match=r"has no model\.safetensors"):
        fs.open_llada(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(fs.UserError, match=r"is no LLaDA checkpoint: its architectures are \['LlamaForCausalLM'\]"):
        fs.open_llada(folder)


def test_an_autoregressive_model_is_called_with_the_causal_mask(llada):
    from dataclasses import replace

    arm = fs.Model(llada.module, replace(llada.spec, family="arm"))
    canvas = canvas_of([[1, 2, 3, 4]], 4, 63)
    with torch.no_grad():
        before = arm.forward(canvas)
        canvas.tokens[0, -1] = 5
        assert torch.equal(arm.forward(canvas)[0, :-1], before[0, :-1])


def test_a_damaged_folder_is_named(tmp_path):
    folder = fs.write_random_llada(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(fs.UserError, match=r"model\.safetensors is damaged .*; fetch it again"):
        fs.open_llada(folder)
    (folder / "config.json").write_text('{"architectures": ["LLaDAModelLM"]}')
    with pytest.raises(fs.UserError, match=r"config\.json lacks d_model, .*: not a LLaDA config"):
        fs.open_llada(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(fs.UserError, match=r"config\.json is damaged"):
        fs.open_llada(folder)
