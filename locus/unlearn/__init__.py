"""Edit what a mask selects, and nothing else."""

from locus.unlearn.engine import unlearn
from locus.unlearn.guard import GuardReport, guard
from locus.unlearn.objectives import NPO, WGA, GradientDifference, NextToken, Objective
from locus.unlearn.optimizers import SGD, AdamW, Optimizer
from locus.unlearn.update import Update

__all__ = [
    "NPO", "SGD", "WGA", "AdamW", "GradientDifference", "GuardReport", "NextToken", "Objective", "Optimizer", "Update",
    "guard", "unlearn",
]  # fmt: skip
