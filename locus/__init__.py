"""locus: locate knowledge in a language model, edit only what you located, and measure whether locating helped."""

from locus.models import HookedModel as HookedModel
from locus.models import load as load
