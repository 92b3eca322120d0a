"""Facts a model may know: where they come from, how they become tokens, splits and contrast pairs.

A fact is a prompt that names its subject and an answer that completes it. Left out: facts with several
right answers.
"""

from locus.facts.pairs import ContrastPairs as ContrastPairs
from locus.facts.sources import biographies as biographies
from locus.facts.sources import capitals as capitals
from locus.facts.sources import counterfact as counterfact
from locus.facts.sources import elements as elements
from locus.facts.sources import from_jsonl as from_jsonl
from locus.facts.sources import tofu as tofu
from locus.facts.split import Facts as Facts
from locus.facts.split import FactSplit as FactSplit
from locus.facts.tokens import Fact as Fact
from locus.facts.tokens import encode as encode
from locus.metrics import Batch as Batch
