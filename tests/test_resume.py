"""What tells two computations apart: the same digest in every process for the same, another one for any other."""

import os
import re
import subprocess
import sys
import weakref
from collections import Counter, defaultdict, deque, namedtuple
from functools import lru_cache, partial
from operator import itemgetter
from types import MappingProxyType, ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped
from small import ARCHITECTURES, tokenizer
from torch import Tensor

from locus.models import wrap
from locus.resume import digest

settings = ModuleType("settings")  # a module of the user's, with no file as in a notebook
sys.modules["settings"] = settings
THRESHOLD = 0


class Metric:
    factor = 1

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, logits):
        return logits[self.answer]

    def method(self, logits):
        return logits[self.answer] * self.factor

    @property
    def of_class(self):
        return self.factor


class Slots:
    __slots__ = ("answer",)

    def __init__(self, answer):
        self.answer = answer


class Probe(torch.nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer, self.linear = answer, torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.linear.weight, 2.0)
        torch.nn.init.constant_(self.linear.bias, 3.0)


def scaled(module, scale):
    module.hooks_scale = scale
    return module


def reading(thing):
    return lambda logits: logits[thing]


def checked(answer):
    @jaxtyped(typechecker=beartype)
    def metric(logits: Tensor) -> Tensor:
        return logits[answer]

    return metric


def attributed(answer):
    def metric(logits):
        return logits * metric.answer

    metric.answer = answer
    return metric


class Words(set):
    pass


def in_comprehension(logits):
    return sum(logit - THRESHOLD for logit in logits)


def of_module(logits):
    return logits - settings.threshold


ALIVE = [Metric(n) for n in range(3)]
KINDS = {
    "method": lambda n: Metric(n).method,
    "callable": Metric,
    "object in an object": lambda n: Metric(Metric(n)),
    "slots": lambda n: Metric(Slots(n)),
    "namespace": lambda n: reading(SimpleNamespace(answer=n)),
    "range": lambda n: reading(range(n, 9)),
    "slice": lambda n: reading(slice(n, 9)),
    "series": lambda n: reading(pd.Series([n, 5])),
    "frame": lambda n: reading(pd.DataFrame({"answer": [n]})),
    "array": lambda n: reading(np.arange(n, 5)),
    "objects": lambda n: reading(np.array([n, "x"], dtype=object)),
    "tensor": lambda n: reading(torch.tensor([n])),
    "deque": lambda n: reading(deque([n])),
    "keys": lambda n: reading({n: 0}.keys()),
    "values": lambda n: reading({0: n}.values()),
    "proxy": lambda n: reading(MappingProxyType({"answer": n})),
    "defaultdict": lambda n: reading(defaultdict(int, {0: n})),
    "counter": lambda n: reading(Counter("a" * n)),
    "set": lambda n: reading({("x", n), ("y", 5), ("z", 6)}),
    "set of objects": lambda n: reading({Metric(n), Metric(5), Metric(6)}),
    "named tuple": lambda n: reading(namedtuple("Pair", "a b")(n, 0)),
    "flag": lambda n: reading(re.RegexFlag(n)),
    "getter": itemgetter,
    "checked": checked,
    "attribute": attributed,
    "pattern": lambda n: reading(re.compile(str(n))),
    "kind of set": lambda n: reading(Words({("x", n), ("y", 5), ("z", 6)})),
    "loss": lambda n: reading(torch.nn.NLLLoss(reduction=["", "sum", "mean"][n])),
    "attribute of a library's module": lambda n: reading(scaled(torch.nn.Identity(), n)),
    "hooks_scale": lambda n: reading(scaled(Probe(0), n)),
    "cached": lambda n: lru_cache(reading(n)),
    "vectorized": lambda n: torch.vmap(reading(n)),
    "weak": lambda n: reading(weakref.ref(ALIVE[n])),
    "partial": lambda n: partial(reading(0), key=n),
    "module": lambda n: reading(Probe(n)),
    "dropout": lambda n: reading(torch.nn.Sequential(torch.nn.Dropout(n / 9))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_metric_holds_tells_it_from_another(kind):
    make = KINDS[kind]
    assert digest(make(1)) == digest(make(1)) != digest(make(2))


@pytest.mark.parametrize(
    ("metric", "owner", "name"),
    [
        (in_comprehension, sys.modules[__name__], "THRESHOLD"),
        (of_module, settings, "threshold"),
        (reading(Metric), Metric, "factor"),
        (Metric(0), Metric, "__call__"),
        (reading(Metric(0)), Metric, "of_class"),
    ],
)
def test_what_a_metric_reads_elsewhere_tells_it_from_another(metric, owner, name, monkeypatch):
    monkeypatch.setattr(settings, "threshold", 0, raising=False)
    before = digest(metric)
    assert digest(metric) == before
    monkeypatch.setattr(owner, name, property(lambda self: 7) if name == "of_class" else reading(7))
    assert digest(metric) != before


def test_models_are_told_apart_by_their_weights():
    def metric(model):
        return lambda logits: model.tokenizer.decode(logits.argmax())

    model = wrap(ARCHITECTURES["llama"]().float(), tokenizer(), "llama")
    before = digest(metric(model))
    model.logits(torch.tensor([[1, 2]]))
    assert digest(metric(model)) == before
    with torch.no_grad():
        next(model.bridge.original_model.parameters())[0] += 1
    assert digest(metric(model)) != before


def test_another_process_finds_the_same():
    code = "import test_resume as t; print([t.digest(make(1)) for make in t.KINDS.values()])"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=os.path.dirname(__file__),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1


def nested(depth):
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    "thing",
    [(x for x in "abc"), torch.eye(2).to_sparse(), torch.empty(2, device="meta"), nested(600), 10**5000],
    ids=["generator", "sparse", "meta", "deep", "huge"],
)
def test_what_has_no_record_is_never_the_same(thing):
    assert digest(reading(thing)) != digest(reading(thing))


def test_cycles_end():
    loop = [1]
    loop.append(loop)
    assert digest(loop) == digest(loop)
