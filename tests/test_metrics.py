"""Every metric against a brute-force reference that loops over rows and tokens."""

import math

import pytest
import torch

from locus import metrics
from locus.metrics import Batch, Targets

ROWS, WIDTH, VOCAB = 12, 9, 7


def example(side: str) -> tuple[torch.Tensor, Batch, list[tuple[int, int]]]:
    """Random logits of padded rows; each row's prompt has 2 to 4 tokens and its answer 1 to 5."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, WIDTH, VOCAB, generator=g, dtype=torch.float64) * 2
    tokens = torch.randint(VOCAB, (ROWS, WIDTH), generator=g)
    attention_mask, answer_mask = torch.zeros(2, ROWS, WIDTH, dtype=torch.bool)
    spans = []
    for row in range(ROWS):
        prompt, answer = 2 + row % 3, 1 + row % 5
        first = 0 if side == "right" else WIDTH - prompt - answer
        attention_mask[row, first : first + prompt + answer] = True
        answer_mask[row, first + prompt : first + prompt + answer] = True
        spans.append((first + prompt, first + prompt + answer))
        if row % 4:  # the last row % 4 tokens of the answer are greedily right
            for t in range(max(first + prompt, spans[-1][1] - row % 4), spans[-1][1]):
                logits[row, t - 1, tokens[row, t]] = 20.0
    return logits, Batch(tokens, attention_mask, answer_mask), spans


@pytest.mark.parametrize("side", ["right", "left"])
def test_answer_metrics_equal_a_loop_over_tokens(side):
    logits, batch, spans = example(side)
    log_probs = metrics.answer_log_probs(logits, batch)
    correct = metrics.answer_correct(logits, batch)
    strength = metrics.extraction_strength(correct, batch.answer_mask)
    floored = metrics.extraction_strength(correct, batch.answer_mask, floor=True)
    exact = metrics.exact(correct, batch.answer_mask)
    probability = metrics.answer_probability(log_probs, batch.answer_mask)
    for row, (start, stop) in enumerate(spans):
        total = 0.0
        for t in range(WIDTH):
            if not start <= t < stop:
                assert log_probs[row, t] == 0 and not correct[row, t]
                continue
            token = int(batch.tokens[row, t])
            p = logits[row, t - 1].exp() / logits[row, t - 1].exp().sum()
            total += math.log(p[token])
            assert log_probs[row, t].item() == pytest.approx(math.log(p[token]), abs=1e-9)
            assert bool(correct[row, t]) == (int(p.argmax()) == token)
        n = stop - start
        hits = [bool(correct[row, t]) for t in range(start, stop)]
        k = next(k for k in range(n + 1) if all(hits[k:]))
        assert strength[row].item() == pytest.approx(1 - k / n)
        assert floored[row].item() == pytest.approx(1 - min(k, n - 1) / n)
        assert bool(exact[row]) == all(hits)
        assert probability[row].item() == pytest.approx(math.exp(total / n))
    assert len(set(strength.tolist())) > 3, "the example must hold graded values"
    assert 0.0 in strength.tolist() and 1.0 in strength.tolist()


def test_metrics_of_read_positions_equal_a_loop():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 3, VOCAB, generator=g)
    answer, distractor = torch.randint(VOCAB, (2, 5, 3), generator=g)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    targets = Targets(answer, distractor, mask)
    difference, log_p = metrics.logit_difference(logits, targets), metrics.log_probability(logits, targets)
    for row in range(5):
        n = int(mask[row].sum())
        want = [logits[row, t, answer[row, t]] - logits[row, t, distractor[row, t]] for t in range(n)]
        assert difference[row].item() == pytest.approx(sum(want).item() / n, abs=1e-6)
        each = [logits[row, t].softmax(-1)[answer[row, t]].log() for t in range(n)]
        assert log_p[row].item() == pytest.approx(sum(each).item() / n, abs=1e-5)
    torch.testing.assert_close(metrics.probability(logits, targets), log_p.exp())
    swapped = metrics.logit_difference(logits, Targets(distractor, answer, mask))
    torch.testing.assert_close(swapped, -difference)


def test_half_precision_is_scored_in_float32():
    logits, batch, _ = example("right")
    half = logits.bfloat16()
    torch.testing.assert_close(metrics.answer_log_probs(half, batch), metrics.answer_log_probs(half.float(), batch))


def test_rows_without_an_answer_are_nan_and_padding_cannot_leak():
    logits, batch, _ = example("right")
    nothing = torch.zeros_like(batch.answer_mask)
    assert metrics.extraction_strength(nothing, nothing).isnan().all()
    assert not metrics.exact(nothing, nothing).any()
    assert metrics.answer_probability(torch.zeros(ROWS, WIDTH), nothing).isnan().all()
    read = torch.zeros_like(batch.answer_mask)
    read[:, :-1] = batch.answer_mask[:, 1:]
    broken = logits.masked_fill(~read[..., None], torch.nan)
    torch.testing.assert_close(metrics.answer_log_probs(broken, batch), metrics.answer_log_probs(logits, batch))


def test_truth_ratio_is_a_ratio_of_geometric_means():
    right = torch.tensor([0.5, 0.1]).log()
    wrong = torch.tensor([[0.2, 0.05], [0.4, torch.nan]]).log()
    torch.testing.assert_close(metrics.truth_ratio(right, wrong), torch.tensor([math.sqrt(0.01) / 0.5, 4.0]))


def test_harmonic_mean():
    values = torch.tensor([[0.5, 0.25, 1.0], [0.0, 0.5, 1.0], [torch.nan, 0.5, 1.0]])
    result = metrics.harmonic_mean(values)
    assert result[0].item() == pytest.approx(3 / 7) and result[1] == 0 and result[2].isnan()
    with pytest.raises(ValueError, match="-0.5"):
        metrics.harmonic_mean(torch.tensor([-0.5, 1.0]))
