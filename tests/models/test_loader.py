"""`fs.load`: it returns the network that was written, and refuses invalid input in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TINY, TINY_ARCHITECTURES, change_weights, edit_json, read_weights, write_tiny

import floatscope as fs
from floatscope.models import device as device_module
from floatscope.models.conversions import llada_to_llama_key
from floatscope.models.description import describe
from pairs import every_pair, slow_except
from type_checks import unchecked


def build_by_hand(folder: Path, architecture: str) -> torch.nn.Module:
    """Build the same network without the loader."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {
        "hidden_size": TINY["width"],
        "num_hidden_layers": TINY["layers"],
        "num_attention_heads": TINY["heads"],
        "num_key_value_heads": TINY["kv_heads"],
        "intermediate_size": TINY["ffn"],
        "vocab_size": 512,
        "tie_word_embeddings": False,
    }
    if architecture == "llada":
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        built_config = transformers.LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope)
        module = transformers.LlamaForCausalLM(built_config)
        state = {llada_to_llama_key(k): t for k, t in read_weights(folder).items()}
    else:
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        built_config = transformers.Qwen2Config(**sizes, rms_norm_eps=1e-6, rope_parameters=rope)
        module, state = transformers.Qwen2ForCausalLM(built_config), read_weights(folder)
    module.load_state_dict(state)
    return module.eval()


@every_pair(architecture=["llada", "dream"], seed=[0, 5], shards=[1, 3])
def test_a_loaded_folder_equals_the_network_built_by_hand(tmp_path, architecture, seed, shards):
    folder = write_tiny(tmp_path / "m", architecture, seed=seed, shards=shards)
    model = fs.load(folder, device="cpu")
    ids = torch.randint(0, 256, (2, 13))
    with torch.no_grad():
        ours = model.module(ids, is_causal=False, use_cache=False).logits
        theirs = build_by_hand(folder, architecture)(ids, is_causal=False, use_cache=False).logits
    assert torch.equal(ours, theirs)
    assert not model.module.training
    assert model.spec.shift is (architecture == "dream")
    assert model.spec.context == (128 if architecture == "llada" else 2048)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_shards_change_nothing(tmp_path, architecture):
    one, four = (fs.load(write_tiny(tmp_path / str(n), architecture, shards=n), device="cpu") for n in (1, 4))
    assert len(list((tmp_path / "4").glob("*.safetensors"))) == 4
    for key, tensor in one.module.state_dict().items():
        assert torch.equal(four.module.state_dict()[key], tensor)


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_the_spec_follows_the_files(tmp_path, architecture):
    model = fs.load(write_tiny(tmp_path / "a name", architecture), device="cpu")
    spec, tokenizer = model.spec, model.tokenizer
    assert spec.name == "a name"
    assert spec.paradigm == ("arm" if architecture == "llama" else "mdm")
    assert spec.architecture == {"llama": "causal"}.get(architecture, architecture)
    mask = {"llada": "<|mdm_mask|>", "dream": "<|mask|>", "llama": None, "bert": "[MASK]"}[architecture]
    assert tokenizer.id_to_token(spec.mask_id) == mask
    ends = {"llada": "<|endoftext|>", "dream": "<|endoftext|>", "llama": "<|im_end|>", "bert": "[SEP]"}
    assert tokenizer.id_to_token(spec.eos_id) == ends[architecture]
    turns = {"llada": "<|eot_id|>", "dream": "<|im_end|>"}
    assert tokenizer.id_to_token(spec.eot_id) == turns.get(architecture)
    assert len(spec.weights) == 64
    assert not spec.uses_remote_code


def test_the_mask_of_llada_comes_from_its_config(tmp_path):
    folder = write_tiny(tmp_path / "m")
    edit_json(folder / "config.json", mask_token_id=None)
    with pytest.raises(fs.UserError, match=r"its mask token was not found in config\.json; give its id with mask_id="):
        fs.load(folder, device="cpu")
    assert fs.load(folder, device="cpu", mask_id=300).spec.mask_id == 300


@pytest.mark.parametrize("mask_id", [-1, 512, 10**9])
def test_a_mask_id_out_of_range_is_refused_wherever_it_comes_from(tmp_path, mask_id):
    folder = write_tiny(tmp_path / "m")
    message = rf"mask id {mask_id} is not a valid token id; expected 0 … 511"
    with pytest.raises(fs.UserError, match=message):
        fs.load(folder, device="cpu", mask_id=mask_id)
    edit_json(folder / "config.json", mask_token_id=mask_id)
    with pytest.raises(fs.UserError, match=message):
        fs.load(folder, device="cpu")


def test_a_mask_id_that_is_not_a_number_is_refused(tmp_path):
    folder = write_tiny(tmp_path / "m")
    edit_json(folder / "config.json", mask_token_id=True)
    with pytest.raises(fs.UserError, match="mask id True is not a valid token id"):
        fs.load(folder, device="cpu")


def test_shift_can_be_overridden(tmp_path):
    assert fs.load(write_tiny(tmp_path / "m"), device="cpu", shift=True).spec.shift is True
    assert fs.load(write_tiny(tmp_path / "d", "dream"), device="cpu", shift=False).spec.shift is False


def test_a_causal_model_with_a_mask_id_denoises(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m", "llama"), device="cpu", mask_id=300)
    assert (model.spec.paradigm, model.spec.shift, model.spec.mask_id) == ("mdm", True, 300)


def test_a_causal_model_that_keeps_its_mask_cannot_denoise(tmp_path, monkeypatch):
    folder = write_tiny(tmp_path / "m", "llama")
    forward = transformers.LlamaForCausalLM.forward

    def ignore_is_causal(self, *args, is_causal=None, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", ignore_is_causal)
    with pytest.raises(fs.UserError, match=r"m \(LlamaForCausalLM\) keeps its causal mask .*, so it cannot denoise"):
        fs.load(folder, device="cpu", mask_id=300)


# --- missing and unexpected tensors ----------------------------------------------------------------------------------

TENSORS = {
    "llada": ("model.transformer.ln_f.weight", "model.norm.weight"),
    "dream": ("model.layers.1.self_attn.k_proj.bias",) * 2,
    "llama": ("model.layers.0.mlp.up_proj.weight",) * 2,
    "bert": ("bert.encoder.layer.1.output.dense.bias",) * 2,
}


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_missing_tensors_are_listed(tmp_path, architecture):
    folder, (key, shown) = write_tiny(tmp_path / "m", architecture), TENSORS[architecture]
    change_weights(folder, lambda tensors: tensors.pop(key))
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    assert str(error.value) == f"{folder}: missing tensors: {shown}; unexpected tensors: none"


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_unexpected_tensors_are_listed(tmp_path, architecture):
    folder = write_tiny(tmp_path / "m", architecture)
    change_weights(folder, lambda tensors: tensors.update({"model.layers.9.extra.weight": torch.zeros(3)}))
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu")
    assert str(error.value) == f"{folder}: missing tensors: none; unexpected tensors: model.layers.9.extra.weight"


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_a_tensor_of_another_shape_is_named(tmp_path, architecture):
    folder, (key, shown) = write_tiny(tmp_path / "m", architecture), TENSORS[architecture]
    size = read_weights(folder)[key].shape[0]
    # as many numbers as before elsewhere, so that only the shape is wrong
    change_weights(folder, lambda t: t.update({key: torch.zeros(size + 1, *t[key].shape[1:])}))
    with pytest.raises(
        fs.UserError, match=rf"its tensor {shown} is \({size + 1}.*, but its config\.json needs \({size}"
    ):
        fs.load(folder, device="cpu")


def test_missing_tensors_are_found_before_any_weight_is_read(tmp_path, monkeypatch):
    folder = write_tiny(tmp_path / "m")
    change_weights(folder, lambda tensors: tensors.pop("model.transformer.ln_f.weight"))
    monkeypatch.setattr(
        transformers.LlamaForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read")
    )
    with pytest.raises(fs.UserError, match=r"missing tensors: model\.norm\.weight"):
        fs.load(folder, device="cpu")


def test_a_tied_head_may_be_missing_from_the_file(tmp_path):
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    module = transformers.Qwen3ForCausalLM(config)
    module.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = fs.load(tmp_path, device="cpu")
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    ids = torch.randint(0, 300, (1, 7))
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, module.eval()(ids).logits)


def test_a2d_is_its_base_model_without_the_causal_mask(tmp_path):
    """dllm's Qwen3: the same weights and keys under another name; the tokenizer has the mask by name."""
    source = write_tiny(tmp_path / "tokens", "dream")
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    module = transformers.Qwen3ForCausalLM(config).eval()
    folder = fs.write_checkpoint(tmp_path / "a2d", module, tokenizer=fs.load(source, device="cpu").tokenizer.hf)
    edit_json(folder / "config.json", architectures=["A2DQwen3LMHeadModel"], model_type="a2d-qwen3")
    model = fs.load(folder, device="cpu")
    assert (model.spec.architecture, model.spec.paradigm, model.spec.shift) == ("a2d", "mdm", False)
    assert model.module.config.model_type == "qwen3"
    assert model.tokenizer.id_to_token(model.spec.mask_id) == "<|mask|>"
    ids = torch.randint(0, 300, (1, 7))
    with torch.no_grad():
        assert torch.equal(model.module(ids, is_causal=False).logits, module(ids, is_causal=False).logits)


def test_an_illada_folder_opens_with_mask_5(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    edit_json(folder / "config.json", architectures=["iLLaDAModelLM"], rope_theta=500000.0)
    model = fs.load(folder, device="cpu")
    assert (model.spec.architecture, model.spec.paradigm, model.spec.mask_id, model.spec.shift) == (
        "illada",
        "mdm",
        5,
        False,
    )


# --- device and dtype ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "bfloat16", torch.bfloat16])
def test_weights_have_the_requested_dtype_and_rotation_stays_fp32(tmp_path, name):
    model = fs.load(write_tiny(tmp_path / "m"), device="cpu", dtype=name)
    assert model.dtype == torch.bfloat16
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    frequencies = model.module.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    exact = 1 / 500000.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(frequencies, exact)
    full = fs.load(tmp_path / "m", device="cpu").module.state_dict()
    assert all(torch.equal(t, full[k].bfloat16()) for k, t in model.module.state_dict().items())


def test_half_precision_files_open_in_float32_on_a_cpu(tmp_path):
    folder = write_tiny(tmp_path / "m")
    change_weights(folder, lambda tensors: tensors.update({k: t.bfloat16() for k, t in tensors.items()}))
    assert fs.load(folder, device="cpu").dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "device cuda does not exist: there is no GPU here; use device='cpu'"),
        ({"device": "cuda:3"}, "device cuda:3 does not exist: there is no GPU here; use device='cpu'"),
        ({"device": "auto"}, "device='auto' spreads a model over GPUs, and there is none here; use device='cpu'"),
        ({"device": "gpu"}, "unknown device 'gpu'; allowed: cpu, cuda, cuda:0 …, mps, auto"),
        ({"device": "meta"}, "unknown device 'meta'; allowed: cpu, cuda, cuda:0 …, mps, auto"),
        ({"dtype": "bfloat"}, "unknown dtype 'bfloat' (did you mean 'bfloat16'?); allowed: float32, fp32, bfloat16,"),
        ({"dtype": torch.int8}, "unknown dtype 'int8'"),
        ({"revision": "main"}, "revision='main' needs a hub id (org/name), and "),
    ],
)
def test_a_device_dtype_or_revision_that_does_not_exist_is_an_error(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(fs.UserError) as error:
        fs.load(write_tiny(tmp_path / "m"), **options)
    assert str(error.value).startswith(message)


def test_too_little_memory_is_an_error_before_loading(tmp_path, monkeypatch):
    folder = write_tiny(tmp_path / "m", width=256, ffn=1024, vocab_size=2048)
    count = sum(t.numel() for t in read_weights(folder).values())
    for free, remedy in (
        (count * 3, rf"dtype='bfloat16' needs {count * 2 / 2**30:.1f} GiB"),
        (count, "use a larger device"),
    ):
        monkeypatch.setattr(device_module, "free_memory", lambda device, free=free: free)
        with pytest.raises(fs.UserError, match=rf"m needs .* GiB on cpu in float32, and .* GiB are free; {remedy}"):
            fs.load(folder, device="cpu")
    monkeypatch.setattr(device_module, "free_memory", lambda device: count * 3)
    assert fs.load(folder, device="cpu", dtype="bf16").dtype == torch.bfloat16


def test_free_memory_of_the_cpu_is_known():
    assert device_module.free_memory(torch.device("cpu")) > 2**20


def test_running_out_of_memory_while_loading_is_an_error(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", full)
    with pytest.raises(fs.UserError, match=r"m needs 0\.0 GiB on cpu in float32, and .* GiB are free"):
        fs.load(write_tiny(tmp_path / "m"), device="cpu")


Peak = namedtuple("Peak", "model shard above")
MEASURE = """
import re, sys, threading, time, torch
torch.set_num_threads(1)
import floatscope as fs
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
device = sys.argv[4]
fs.load(sys.argv[1], device=device)  # whatever is imported and cached once
highest, stop = 0, False
def watch():
    global highest
    while not stop:
        highest = max(highest, anonymous())
        time.sleep(0.0005)
before = anonymous()
thread = threading.Thread(target=watch); thread.start()
model = fs.load(sys.argv[2], device=device, dtype=sys.argv[3])
stop = True; thread.join()
sizes = [p.numel() * p.element_size() for p in model.module.parameters()]
print(highest - before, sum(sizes), max(sizes))
"""


LARGE = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "vocab_size": 8192}


def measure_load(tmp_path, folder, architecture, dtype, device):
    """How much the host memory grows while a model loads, the size of the model and of its largest tensor."""
    tiny = write_tiny(tmp_path / "m", architecture)
    command = [sys.executable, "-c", MEASURE, str(tiny), str(folder), dtype, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return map(int, done.stdout.split())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "stored_and_requested", slow_except(["bfloat16 float32", "float32 bfloat16", "float32 float32"], "float32 bfloat16")
)
@pytest.mark.parametrize("architecture", ["llada", "llada2"])
def test_peak_host_memory_is_the_model_and_about_one_shard(tmp_path, stored_and_requested, architecture):
    stored, requested = stored_and_requested.split()
    folder = fs.write_random(tmp_path / "large", architecture, shards=4, **LARGE)
    for file in folder.glob("*.safetensors"):
        save_file({k: t.to(getattr(torch, stored)) for k, t in load_file(file).items()}, file)
    grown, model, largest = measure_load(tmp_path, folder, architecture, requested, "cpu")
    shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    stacks = 2 * largest if architecture == "llada2" else 0  # the experts of a layer, one by one and stacked
    assert grown <= model + 1.2 * shard + stacks, (
        f"{grown / 2**20:.0f} MiB for {model / 2**20:.0f} and a shard of {shard / 2**20:.0f}"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("architecture", ["llada2", "sdar-moe", "llada-moe"])
def test_experts_are_streamed_to_the_gpus_without_a_host_copy_of_the_model(tmp_path, architecture):
    folder = fs.write_random(tmp_path / "large", architecture, shards=4, **LARGE)
    grown, model, largest = measure_load(tmp_path, folder, architecture, "float32", "auto")
    assert grown <= 2 * largest < model / 4, f"{grown / 2**20:.0f} MiB for a model of {model / 2**20:.0f}"


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(fs.UserError, match=r"nowhere is not a folder; give a checkpoint folder, a hub id \(org/name\)"):
        fs.load(tmp_path / "nowhere")


def test_an_unknown_twin_is_refused_with_the_shipped_ones():
    message = r"unknown twin 'mdn' \(did you mean 'mdm'\?\); allowed: arm, mdm, mdm-adapted"
    with pytest.raises(fs.UserError, match=message):
        fs.load("twin:mdn")


def test_an_unknown_architecture_is_refused_and_its_code_not_run(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    (folder / "modeling_unknown.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit_json(
        folder / "config.json", architectures=["UnknownModel"], auto_map={"AutoModel": "modeling_unknown.UnknownModel"}
    )
    message = r"unknown architecture UnknownModel .*; it has its own code, which runs only with trust_remote_code=True"
    with pytest.raises(fs.UserError, match=message):
        fs.load(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


def test_remote_code_runs_if_trusted_and_the_spec_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_tiny(tmp_path / "own_code", "llama")
    code = "from transformers import LlamaForCausalLM\nclass OwnModel(LlamaForCausalLM):\n    pass\n"
    (folder / "modeling_own.py").write_text(code)
    edit_json(
        folder / "config.json", architectures=["OwnModel"], auto_map={"AutoModelForCausalLM": "modeling_own.OwnModel"}
    )
    model = fs.load(folder, device="cpu", trust_remote_code=True)
    assert type(model.module).__name__ == "OwnModel"
    assert (model.spec.uses_remote_code, model.spec.paradigm, model.spec.architecture) == (True, "arm", "remote")
    plain = fs.load(write_tiny(tmp_path / "plain", "llama"), device="cpu", trust_remote_code=True)
    assert plain.spec.uses_remote_code is False  # a row of the table opens it, so its code is not needed


def test_a_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tiny(tmp_path / "m")
    assert fs.load("~/m", device="cpu").spec.name == "m"


def test_loading_prints_nothing(tmp_path, capfd):
    fs.load(write_tiny(tmp_path / "m"), device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("function", [fs.load, describe])
@pytest.mark.parametrize("name", ["~nobody-here/x", "a\0b", "x" * 5000, None, 5, b"abc", [], ""])
def test_invalid_names_give_one_sentence(name, function):
    with unchecked(), pytest.raises(fs.UserError) as error:
        function(name)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 6000


@pytest.mark.parametrize("shift", [True, False])
def test_shift_is_refused_for_autoregressive_models(tmp_path, shift):
    with pytest.raises(fs.UserError, match="shift= is for masked diffusion models, and this model is autoregressive"):
        fs.load(write_tiny(tmp_path / "m", "llama"), device="cpu", shift=shift)


def test_the_repr_of_a_model_is_one_line(tmp_path):
    model = fs.load(write_tiny(tmp_path / "m"), device="cpu")
    parameters = sum(p.numel() for p in model.module.parameters())
    assert repr(model) == f"Model(m: masked diffusion, 2 layers, {parameters:,} parameters, float32 on cpu)"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "other/repo--modeling_x.X",
            "needs code that is not in its folder (other/repo--modeling_x.X), which is not run",
        ),
        (5, "needs code that is not in its folder (5), which is not run"),
        ("missing_file.X", "failed ("),
        ("modeling_own.Nothing", "failed ("),
    ],
)
def test_remote_code_that_is_missing_or_elsewhere_gives_one_sentence(tmp_path, monkeypatch, reference, message):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_tiny(tmp_path / "own_code2", "llama")
    (folder / "modeling_own.py").write_text("class Other:\n    pass\n")
    edit_json(folder / "config.json", architectures=["OwnModel"], auto_map={"AutoModelForCausalLM": reference})
    with pytest.raises(fs.UserError) as error:
        fs.load(folder, device="cpu", trust_remote_code=True)
    assert message in str(error.value)
    assert str(error.value).isprintable()


def test_an_interrupt_that_caused_an_import_error_is_raised_as_such(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module 'LlamaForCausalLM'.") from error

    folder = write_tiny(tmp_path / "m")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fs.load(folder, device="cpu")


def test_an_error_while_an_interrupt_is_handled_stays_an_error(tmp_path):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(fs.UserError):
            fs.load(tmp_path / "nowhere")
