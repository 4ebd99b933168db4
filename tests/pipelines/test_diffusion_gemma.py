"""DiffusionGemma: its decoding is that of its authors' generate() with our random numbers, in batches too."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

import floatscope as fs
from floatscope.cli.view import CanvasView
from floatscope.reports.explorer import build_payload
from floatscope.sampling.randomness import gumbel, step_keys, uniform
from floatscope.schema import State

CANVAS = 8
TINY = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab_size": 300}
COLD = "renoise(t_max=0.02, t_min=0.01, entropy_bound={bound}, stability_threshold={stable}, confidence_threshold=0.5)"
COLDER = COLD.replace("t_max=0.02, t_min=0.01", "t_max=0.005, t_min=0.002")


@pytest.fixture(scope="module", params=[0, 1])
def model(request, tmp_path_factory) -> fs.Model:
    folder = tmp_path_factory.mktemp("gemma") / "m"
    return fs.load(fs.write_random(folder, "diffusion-gemma", seed=request.param, **TINY), device="cpu")


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (length,), generator=generator).tolist()


class InjectedNoise:
    """Our random numbers in the order in which the authors' code draws its own, for one prompt named "0"."""

    def __init__(self, prompt: int, steps_of_canvases: list[int], seed: int, vocabulary: int) -> None:
        self.seed, self.vocabulary = seed, vocabulary
        self.calls: list[tuple[str, int, int]] = []  # purpose, step, first position
        step = 0
        for number, steps in enumerate(steps_of_canvases):
            start = prompt + number * CANVAS
            self.calls.append(("first noise", step, start))
            for _ in range(steps):
                self.calls += [("token", step, start), ("noise", step, start)]
                step += 1

    def next_key(self, purposes: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        purpose, step, start = self.calls.pop(0)
        assert purpose in purposes
        return step_keys(self.seed, ["0"], step, purpose), torch.arange(start, start + CANVAS)

    def randint(self, low: int, high: int, size: tuple[int, ...], device: object) -> torch.Tensor:
        assert (low, high, size) == (0, self.vocabulary, (1, CANVAS))
        key, position = self.next_key(("first noise", "noise"))
        return (uniform(key[:, None], position) * high).long()

    def multinomial(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        key, position = self.next_key(("token",))
        noise = gumbel(key[:, None], position[:, None] * 2**32 + torch.arange(self.vocabulary))
        return (probabilities.double().log() + noise).argmax(-1, keepdim=True)


def generate_officially(
    model: fs.Model, prompt: list[int], noise: InjectedNoise, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> list[int]:
    import transformers.models.diffusion_gemma.generation_diffusion_gemma as generation

    class Torch:
        """torch with other random numbers."""

        randint, multinomial = staticmethod(noise.randint), staticmethod(noise.multinomial)

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    with monkeypatch.context() as patch:
        patch.setattr(generation, "torch", Torch())
        out = model.module.generate(
            torch.tensor([prompt]), eos_token_id=list(model.spec.stop_ids), pad_token_id=model.spec.pad_id, **settings
        )
    return out.sequences[0].tolist()


def count_steps(out: fs.Decoding) -> list[int]:
    starts = [int(step.before.block[0, 0]) for step in out.steps]
    return [starts.count(start) for start in dict.fromkeys(starts)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("length", "steps", "bound", "stable", "sampler"),
    [
        (5, 6, 0.1, 1, "renoise"),
        (5, 9, 0.1, 1, COLD),
        (21, 12, 2.0, 0, COLD),
        (33, 12, 1e-6, 2, COLD),
        (21, 12, 2.0, 2, COLDER),
        (30, 1, 0.5, 1, COLD),
    ],
)
def test_decoding_is_that_of_generate(model, monkeypatch, seed, length, steps, bound, stable, sampler):
    prompt = random_prompt(length, seed)
    sampler = sampler.format(bound=bound, stable=stable)
    out = fs.decode(model, [prompt], preset="diffusion-gemma", sampler=sampler, new_tokens=20, steps=steps, seed=seed)
    arguments = dict(out.sampling.arguments)
    noise = InjectedNoise(length, count_steps(out), seed, model.vocab_size)
    settings = {"max_new_tokens": 20, "max_denoising_steps": steps}
    settings |= {"sampler_config": EntropyBoundSamplerConfig(arguments.pop("entropy_bound"))}
    expected = generate_officially(model, prompt, noise, monkeypatch, **settings, **arguments)
    assert not noise.calls  # the same number of steps in each canvas
    ours = out.tokens[0].tolist()
    ends = [i for i, token in enumerate(expected[length:]) if token in model.spec.stop_ids]
    stop = length + ends[0] + 1 if ends else len(expected)  # generate() writes padding after an end token
    assert len(ours) == len(expected)
    assert ours[:stop] == expected[:stop]


def test_the_cases_above_end_canvases_early_and_renoise(model):
    sampler = COLD.format(bound=2.0, stable=0)
    out = fs.decode(model, [random_prompt(21, 0)], sampler=sampler, new_tokens=20, steps=12)
    assert min(count_steps(out)) < 12
    cautious = fs.decode(model, [random_prompt(5, 0)], new_tokens=20, steps=9)
    assert any(step.is_renoised.any() for step in cautious.steps)


def test_a_batch_of_unequal_prompts_gives_what_each_prompt_gives_alone(model):
    prompts = [random_prompt(n, n) for n in (17, 5, 30)]
    settings = {"sampler": COLD.format(bound=0.1, stable=0), "new_tokens": 24, "steps": 9, "watch": fs.Watch()}
    batch = fs.decode(model, prompts, samples=["a", "b", "c"], **settings)
    assert len({len(t.arrays["keys"]) for t in batch.traces}) > 1  # some end before others
    for b, (name, prompt) in enumerate(zip("abc", prompts, strict=True)):
        alone = fs.decode(model, [prompt], samples=[name], **settings)
        assert batch.generated_ids[b] == alone.generated_ids[0]
        together, single = batch.traces[b].arrays, alone.trace.arrays
        assert together.keys() == single.keys()
        for field, values in single.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(together[field], values, 2e-3, 2e-5, err_msg=field)
            else:
                np.testing.assert_array_equal(together[field], values, err_msg=field)


@pytest.mark.parametrize("length", [3, 14, 40])
def test_attention_of_the_canvas_is_captured_exactly(model, length):
    watch = fs.Watch(level="full", verify=True)
    out = fs.decode(model, [random_prompt(length, 1)], new_tokens=16, steps=3, watch=watch)
    trace = out.trace
    plain = fs.decode(model, [random_prompt(length, 1)], new_tokens=16, steps=3)
    assert torch.equal(out.tokens, plain.tokens)
    assert trace.meta["rows"] == "block"
    assert trace.arrays["queries"].tolist() == [CANVAS] * len(out.steps)
    matrix = trace.arrays["matrix"]  # [step, layer, head, query, key]
    for step, taken in enumerate(out.steps):
        start = int(taken.before.block[0, 0])
        hidden = max(0, start - 11)  # windows of 12: the last 11 positions of the text
        rows = matrix[step, :, :, :, : start + CANVAS]
        np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-4)
        assert (rows[:2, ..., :hidden] == 0).all()
        assert (rows[:2, ..., hidden:] > 0).any((0, 1, 2)).all()
        assert (rows[2] > 0).any((0, 1)).all()


def test_states_of_a_canvas(model):
    out = fs.decode(model, [random_prompt(9, 4)], new_tokens=16, steps=6, watch=fs.Watch())
    last_token: dict[int, int] = {}
    for step in out.steps:
        before, after = step.before, step.after
        canvas = slice(int(before.block[0, 0]), int(before.block[0, 1]))
        assert not before.masked.any()
        assert ((before.states[0, canvas] == State.NOISE) | (before.states[0, canvas] == State.COMMITTED)).all()
        for position, token, is_edit in zip(
            step.commits.position.tolist(), step.commits.token.tolist(), step.is_edit.tolist(), strict=True
        ):
            assert int(after.states[0, position]) == State.COMMITTED
            assert is_edit == (int(before.states[0, position]) == State.COMMITTED)
            assert not is_edit or int(before.tokens[0, position]) != token
            last_token[position] = token
        kept = (before.states == State.COMMITTED) & (after.states == State.COMMITTED)
        kept[step.commits.sample, step.commits.position] = False
        assert (before.tokens == after.tokens)[kept].all()
    assert (out.steps[-1].after.states[0, 9:] == State.COMMITTED).all()
    assert [last_token[p] for p in range(9, 25)] == out.tokens[0, 9:].tolist()
    trace = out.trace
    last = trace.is_last_commit
    assert trace.arrays["commit_token"][last][np.argsort(trace.arrays["commit_position"][last])].tolist() == (
        out.tokens[0, 9:].tolist()
    )
    renoised = np.stack([np.pad(s.is_renoised[0].numpy(), (0, 25 - s.before.tokens.shape[1])) for s in out.steps])
    np.testing.assert_array_equal(trace.is_renoised, renoised)
    assert renoised.any()


def refuse(run: Callable[[], object], *words: str) -> None:
    with pytest.raises(fs.UserError) as error:
        run()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": "confidence"}, ("'confidence'", "without a mask token", "'renoise'")),
        ({"preset": "llada"}, ("'llada'", "this one has none", "diffusion-gemma")),
        ({"infill": True}, ("no mask token", "leave infill out")),
        ({"target_ids": [[1, 2]]}, ("leave target_ids out",)),
        ({"suffix": [5]}, ("leave suffix",)),
        ({"new_tokens": 0}, ("new_tokens must be at least 1",)),
        ({"block": 4}, ("block does not apply to 'renoise'",)),
        ({"temperature": 0.5}, ("t_max to t_min",)),
        ({"top_k": 5}, ("top_k does not apply",)),
        ({"sampler": "renoise(entropy_bound=0)"}, ("entropy_bound", "above 0")),
        ({"sampler": "renoise(confidence_threshold=-1)"}, ("confidence_threshold", "above 0")),
        ({"sampler": "renoise(t_min=0.9)"}, ("t_min at most t_max",)),
        ({"sampler": "renoise(t_min=0)"}, ("temperatures from 1e-06",)),
        ({"sampler": "renoise(stability_threshold=-1)"}, ("stability_threshold", "0 to 100")),
        ({"sampler": "renoise(tau=1)"}, ("tau", "entropy_bound")),
        ({"watch": fs.Watch(influence=True)}, ("leave influence out",)),
        ({"watch": fs.Watch(fields=("rollout",))}, ("rollout", "encoder")),
        ({"edits": "drop_bos"}, ("cannot act", "encoded before a canvas")),
        ({"edits": "freeze"}, ("cannot act", "grow by canvases")),
    ],
)
def test_what_cannot_be_decoded_is_refused(model, settings, words):
    refuse(lambda: fs.decode(model, [random_prompt(4, 0)], **settings), *words)


def test_renoising_is_refused_on_a_model_with_masks():
    twin = fs.load("twin:mdm", device="cpu")
    refuse(lambda: fs.decode(twin, "Who?", preset="diffusion-gemma"), "without a mask token", "this one has one")
    refuse(lambda: fs.decode(twin, "Who?", sampler="renoise"), "'renoise' is not for a masked diffusion model")
    refuse(lambda: twin.canvas_forward(), "does not denoise canvases")
    refuse(lambda: fs.decode(fs.load("twin:arm", device="cpu"), "Who?", preset="diffusion-gemma"), "autoregressive")


def test_an_edit_of_the_attention_acts_on_the_canvas(model):
    prompt = [random_prompt(20, 3)]
    watch = fs.Watch(level="full")
    out = fs.decode(model, prompt, new_tokens=8, steps=2, watch=watch, edits="mask_anchors(k=3)")
    matrix = out.trace.arrays["matrix"]
    assert (matrix == 0).any()
    assert out.doses[0] > 0


def test_the_spec_says_what_the_model_is(model, tmp_path):
    spec = model.spec
    assert (spec.paradigm, spec.noise, spec.canvas_size) == (fs.Paradigm.MDM, "uniform", CANVAS)
    assert (spec.mask_id, spec.block_size, spec.shift) == (None, None, False)
    assert type(model.module).__name__ == "DiffusionGemmaForBlockDiffusion"
    assert "canvases of 8" in repr(model)
    assert model.metadata["canvas_size"] == CANVAS
    folder = fs.write_random(tmp_path / "m", "diffusion-gemma", **TINY)
    refuse(lambda: fs.load(folder, device="cpu", mask_id=3), "no mask token", "leave out mask_id=")
    refuse(lambda: fs.load(folder, device="cpu", block_size=4), "leave out block_size=")
    refuse(lambda: fs.load(folder, device="cpu", shift=True), "leave out shift=")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"canvas_length": 0}))
    refuse(lambda: fs.load(folder, device="cpu"), "canvas size 0 is not valid", "at least 1")


def test_a_forward_over_a_whole_text_is_refused(model):
    out = fs.decode(model, [random_prompt(4, 0)], new_tokens=8, steps=2)
    refuse(lambda: model.forward(out.steps[0].before), "denoises a canvas", "use fs.decode")
    refuse(lambda: fs.final_state(out), "denoises a canvas")


def test_a_trace_file_keeps_noise_and_the_explorer_shows_it(model, tmp_path):
    settings = {"new_tokens": 12, "steps": 5, "stop": False}
    run = fs.trace(model, ["Where does Mira live?", "Who sings?"], tmp_path / "run", batch_size=2, **settings)
    assert run[0].meta["rows"] == "block"
    assert "rollout" not in run[0].meta["fields"]
    alone = fs.trace(model, ["Where does Mira live?", "Who sings?"], tmp_path / "alone", batch_size=1, **settings)
    for one, other in zip(run, alone, strict=True):
        assert (one.arrays["states"] == State.NOISE).any()
        np.testing.assert_array_equal(one.arrays["states"], other.arrays["states"])
        np.testing.assert_array_equal(one.arrays["tokens"], other.arrays["tokens"])
    payload = build_payload(run[0], "gemma")
    noise = [change for change in payload["changes"] if change[3] == State.NOISE]
    assert len(noise) > run[0].is_renoised.sum() > 0
    figure = run[0].plot(path=tmp_path / "map.png")
    assert "noise" in " ".join(text.get_text() for text in figure.legends[0].get_texts())
    table = fs.analysis.masked_rows(run)
    assert np.isfinite(table["mass"]).all()


def test_the_terminal_counts_noise_and_renoised_positions(model):
    out = fs.decode(model, [random_prompt(9, 4)], new_tokens=16, steps=6)
    view, records = CanvasView(out, None, Console(width=80)), []
    for step in out:
        view.count(step)
        records.append(view.record(step))
        line = str(view._counters(step))
        assert f"{int(step.after.noise.sum())} noise" in line
        assert view.committed == int((step.after.states == State.COMMITTED).sum())
    renoised = [position for record in records for position in record.get("renoised", [])]
    assert len(renoised) == view.renoised > 0
    assert "canvas 2/2" in line
