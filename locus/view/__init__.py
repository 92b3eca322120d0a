"""Pictures of everything: functions of data that return one `View`, which shows in a notebook and saves to a file.

    locus.view.attention(model, "The capital of France is", scores=scores)     # in a notebook, the last value shows
    locus.view.grid(scores).save("heads.svg")                                   # .html, .svg, .png, .pdf
    Path("page.html").write_text(locus.view.page([a, b, c], title="A fact"))    # one file that opens anywhere

Views in a notebook are pictures that every host shows; `locus.view.notebook()` in one cell makes them interactive.
Positive scores are orange, negative ones blue, zero is neutral.
"""

from locus.view.graph import circuit as circuit
from locus.view.grids import density as density
from locus.view.grids import grid as grid
from locus.view.grids import overlap as overlap
from locus.view.grids import ranking as ranking
from locus.view.grids import sweep as sweep
from locus.view.grids import trace as trace
from locus.view.results import before_after as before_after
from locus.view.results import evaluation as evaluation
from locus.view.results import mask as mask
from locus.view.results import study as study
from locus.view.results import tradeoff as tradeoff
from locus.view.results import update as update
from locus.view.show import View as View
from locus.view.show import notebook as notebook
from locus.view.show import page as page
from locus.view.text import attention as attention
from locus.view.text import attribution as attribution
from locus.view.text import neuron_attributions as neuron_attributions
from locus.view.text import neurons as neurons
