"""The losses against sums written out mask by mask."""

from __future__ import annotations

import math

import pytest
import torch

from floatscope.lab.adapt.lessons import ANSWER, PAD, PROMPT, TAIL
from floatscope.lab.adapt.losses import TAIL_WEIGHT, answer_loss, diffusion_loss, next_answer_loss, next_token_loss
from floatscope.lab.training.masks import LEAST_TIME

MASK, WORDS = 11, 12
ROLES = [PROMPT] * 6 + [ANSWER] * 2 + [TAIL] * 2 + [PAD] * 2


class Network:
    """Logits that depend on everything it is shown; it keeps what that was."""

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def __call__(self, tokens, valid):
        self.shown, self.valid = tokens, valid
        return self.table[tokens] + self.table[tokens].mean(1, keepdim=True)


def nats(network, row: int, position: int, token: int) -> float:
    """−log p of a token by the row before it."""
    logits = network(network.shown, network.valid)[row, position - 1].tolist()
    return math.log(sum(math.exp(x) for x in logits)) - logits[token]


@pytest.mark.parametrize("seed", range(4))
def test_the_diffusion_loss_is_a_sum_over_masks_weighted_by_1_over_t(seed):
    tokens = torch.randint(0, MASK, (5, 9), generator=torch.Generator().manual_seed(seed))
    network = Network(seed)
    loss = diffusion_loss(network, tokens, torch.Generator().manual_seed(seed), MASK)
    draw = torch.Generator().manual_seed(seed)
    t = (torch.rand(5, 1, generator=draw) * (1 - LEAST_TIME) + LEAST_TIME).flatten().tolist()
    total = sum(
        nats(network, row, position, int(tokens[row, position])) / t[row]
        for row in range(5)
        for position in range(1, 9)
        if network.shown[row, position] == MASK
    )
    assert float(loss) == pytest.approx(total / (5 * 8), rel=1e-5)
    assert network.valid is None
    assert (network.shown == MASK).any()
    kept = network.shown != MASK
    assert torch.equal(network.shown[kept], tokens[kept])


def test_as_many_are_masked_as_t_says():
    tokens = torch.zeros(4000, 50, dtype=torch.long)
    network = Network(0)
    diffusion_loss(network, tokens, torch.Generator().manual_seed(0), MASK)
    t = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0)) * (1 - LEAST_TIME) + LEAST_TIME
    share = (network.shown == MASK).double().mean(1, keepdim=True)
    assert float((share - t).mean().abs()) < 0.005
    assert float(((share - t) ** 2).mean()) == pytest.approx(float((t * (1 - t)).mean()) / 50, rel=0.1)


def answered(rows: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and their roles: six of a prompt, two each of an answer, of its end, of padding."""
    return torch.randint(0, MASK, (rows, 12), generator=draw), torch.tensor([ROLES] * rows)


@pytest.mark.parametrize("seed", range(4))
def test_the_answer_loss_is_the_mean_of_answers_and_a_tenth_of_the_ends(seed):
    draw = torch.Generator().manual_seed(seed)
    tokens, roles = answered(6, draw)
    network = Network(seed)
    loss = answer_loss(network, tokens, roles, draw, MASK)
    masked = network.shown == MASK
    assert not masked[roles == PROMPT].any()
    assert not masked[roles == PAD].any()
    assert torch.equal(network.valid, roles != PAD)
    parts = {}
    for role in (ANSWER, TAIL):
        where = (masked & (roles == role)).nonzero().tolist()
        each = [nats(network, row, position, int(tokens[row, position])) for row, position in where]
        parts[role] = sum(each) / max(1, len(each))
    assert float(loss) == pytest.approx(parts[ANSWER] + TAIL_WEIGHT * parts[TAIL], rel=1e-5)


def test_answers_are_mostly_masked_whole():
    roles = torch.full((2000, 10), PROMPT)
    roles[:, 4:] = ANSWER
    network = Network(0)
    answer_loss(network, torch.zeros(2000, 10, dtype=torch.long), roles, torch.Generator().manual_seed(0), MASK)
    whole = (network.shown[:, 4:] == MASK).all(1).double().mean()
    assert 0.6 < float(whole) < 0.8


@pytest.mark.parametrize("seed", range(2))
def test_the_losses_of_a_control_are_those_of_next_tokens(seed):
    draw = torch.Generator().manual_seed(seed)
    tokens, roles = answered(4, draw)
    network = Network(seed)
    loss = next_token_loss(network, tokens)
    each = [[nats(network, row, p, int(tokens[row, p])) for p in range(1, 12)] for row in range(4)]
    assert float(loss) == pytest.approx(sum(map(sum, each)) / 44, rel=1e-5)
    loss = next_answer_loss(network, tokens, roles)
    assert torch.equal(network.shown, tokens)
    assert torch.equal(network.valid, roles != PAD)
    answers, ends = (sum(sum(row[a - 1 : b - 1]) for row in each) / 8 for a, b in ((6, 8), (8, 10)))
    assert float(loss) == pytest.approx(answers + TAIL_WEIGHT * ends, rel=1e-5)
