"""Edit what a mask selects, and nothing else."""

from locus.unlearn.engine import unlearn
from locus.unlearn.guard import GuardReport, guard
from locus.unlearn.objectives import DPO, NPO, RMU, WGA, GradientDifference, MatchMLP, NextToken, Objective, SimNPO
from locus.unlearn.optimizers import SGD, AdamW, Optimizer
from locus.unlearn.update import Update

__all__ = [
    "DPO", "NPO", "RMU", "SGD", "WGA", "AdamW", "GradientDifference", "GuardReport", "MatchMLP", "NextToken",
    "Objective", "Optimizer", "SimNPO", "Update", "guard", "unlearn",
]  # fmt: skip
