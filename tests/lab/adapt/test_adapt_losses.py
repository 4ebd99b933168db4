"""The losses of an adaptation, compared with sums over single masks."""

from __future__ import annotations

import math

import pytest
import torch

from floatscope.lab.adapt.examples import ANSWER, PAD, PROMPT, TAIL
from floatscope.lab.adapt.train import TAIL_WEIGHT, answer_loss, diffusion_loss, next_answer_loss, next_token_loss
from floatscope.lab.training.losses import MIN_MASK_RATE

MASK, WORDS = 11, 12
ROLES = [PROMPT] * 6 + [ANSWER] * 2 + [TAIL] * 2 + [PAD] * 2


class Network:
    """Logits that depend on all inputs, which it records."""

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def __call__(self, tokens, valid):
        self.tokens, self.valid = tokens, valid
        return self.table[tokens] + self.table[tokens].mean(1, keepdim=True)


def nats(network, row: int, position: int, token: int) -> float:
    """Return −log p of a token from the row before it."""
    logits = network(network.tokens, network.valid)[row, position - 1].tolist()
    return math.log(sum(math.exp(x) for x in logits)) - logits[token]


@pytest.mark.parametrize("seed", range(4))
def test_diffusion_loss_is_a_sum_over_masks_weighted_by_one_over_t(seed):
    tokens = torch.randint(0, MASK, (5, 9), generator=torch.Generator().manual_seed(seed))
    network = Network(seed)
    loss = diffusion_loss(network, tokens, torch.Generator().manual_seed(seed), MASK)
    rng = torch.Generator().manual_seed(seed)
    t = (torch.rand(5, 1, generator=rng) * (1 - MIN_MASK_RATE) + MIN_MASK_RATE).flatten().tolist()
    total = sum(
        nats(network, row, position, int(tokens[row, position])) / t[row]
        for row in range(5)
        for position in range(1, 9)
        if network.tokens[row, position] == MASK
    )
    assert float(loss) == pytest.approx(total / (5 * 8), rel=1e-5)
    assert network.valid is None
    assert (network.tokens == MASK).any()
    unmasked = network.tokens != MASK
    assert torch.equal(network.tokens[unmasked], tokens[unmasked])


def test_share_of_masks_is_t():
    tokens = torch.zeros(4000, 50, dtype=torch.long)
    network = Network(0)
    diffusion_loss(network, tokens, torch.Generator().manual_seed(0), MASK)
    t = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0)) * (1 - MIN_MASK_RATE) + MIN_MASK_RATE
    share = (network.tokens == MASK).double().mean(1, keepdim=True)
    assert float((share - t).mean().abs()) < 0.005
    assert float(((share - t) ** 2).mean()) == pytest.approx(float((t * (1 - t)).mean()) / 50, rel=0.1)


def random_rows(rows: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and roles: six of a prompt, two each of an answer, its tail, and padding."""
    return torch.randint(0, MASK, (rows, 12), generator=rng), torch.tensor([ROLES] * rows)


@pytest.mark.parametrize("seed", range(4))
def test_answer_loss_is_the_mean_of_answers_plus_a_tenth_of_tails(seed):
    rng = torch.Generator().manual_seed(seed)
    tokens, roles = random_rows(6, rng)
    network = Network(seed)
    loss = answer_loss(network, tokens, roles, rng, MASK)
    masked = network.tokens == MASK
    assert not masked[roles == PROMPT].any()
    assert not masked[roles == PAD].any()
    assert torch.equal(network.valid, roles != PAD)
    means = {}
    for role in (ANSWER, TAIL):
        where = (masked & (roles == role)).nonzero().tolist()
        losses = [nats(network, row, position, int(tokens[row, position])) for row, position in where]
        means[role] = sum(losses) / max(1, len(losses))
    assert float(loss) == pytest.approx(means[ANSWER] + TAIL_WEIGHT * means[TAIL], rel=1e-5)


def test_most_answers_are_masked_completely():
    roles = torch.full((2000, 10), PROMPT)
    roles[:, 4:] = ANSWER
    network = Network(0)
    answer_loss(network, torch.zeros(2000, 10, dtype=torch.long), roles, torch.Generator().manual_seed(0), MASK)
    complete = (network.tokens[:, 4:] == MASK).all(1).double().mean()
    assert 0.6 < float(complete) < 0.8


@pytest.mark.parametrize("seed", range(2))
def test_control_losses_are_next_token_losses(seed):
    rng = torch.Generator().manual_seed(seed)
    tokens, roles = random_rows(4, rng)
    network = Network(seed)
    loss = next_token_loss(network, tokens)
    losses = [[nats(network, row, p, int(tokens[row, p])) for p in range(1, 12)] for row in range(4)]
    assert float(loss) == pytest.approx(sum(map(sum, losses)) / 44, rel=1e-5)
    loss = next_answer_loss(network, tokens, roles)
    assert torch.equal(network.tokens, tokens)
    assert torch.equal(network.valid, roles != PAD)
    answers, tails = (sum(sum(row[a - 1 : b - 1]) for row in losses) / 8 for a, b in ((6, 8), (8, 10)))
    assert float(loss) == pytest.approx(answers + TAIL_WEIGHT * tails, rel=1e-5)
