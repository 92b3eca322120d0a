"""Circuits: which components and edges carry an answer, how much of it they carry alone, and a picture of them."""

from locus.circuits.faithful import FRACTIONS, Faithfulness, curves, faithfulness
from locus.circuits.graph import circuit, node_link, save_circuit

__all__ = [
    "FRACTIONS",
    "Faithfulness",
    "circuit",
    "curves",
    "faithfulness",
    "node_link",
    "save_circuit",
]
