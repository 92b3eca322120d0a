"""Shared models; everything runs offline, so a test that asks the network for anything fails."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from helpers import ARCHITECTURES, tokenizer

from locus.models import HookedModel, wrap


@pytest.fixture(scope="session", params=ARCHITECTURES)
def any_model(request) -> HookedModel:
    """A random model of each architecture, in float64."""
    return wrap(ARCHITECTURES[request.param]().double(), tokenizer(), request.param)


@pytest.fixture(scope="session")
def llama() -> HookedModel:
    """A random grouped-query llama in float64."""
    return wrap(ARCHITECTURES["llama"]().double(), tokenizer(), "llama")


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 97, (3, 7), generator=torch.Generator().manual_seed(1))
