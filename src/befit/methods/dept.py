"""DEPT, variant SPEC (Iacob et al. 2025): all weights are federated but each client's embeddings, which are its own."""

from typing import Annotated

from befit.adapters.keys import slot
from befit.adapters.layout import whole
from befit.adapters.whole_model import embeddings
from befit.core.schema import POSITIVE
from befit.core.values import ClientWeights
from befit.merge.merge import Merge
from befit.methods.parts.recipe.recipe import Recipe
from befit.protocol.method import Use
from befit.protocol.registry import register
from befit.train.passes import Pass


@register("dept", title="DEPT (SPEC)", paper="arXiv:2410.05021", year=2025)
def dept(lr_scale: Annotated[float, POSITIVE] = 0.1, weights: ClientWeights = "examples") -> Recipe:
    """Fine-tune all weights, average all but the embeddings, and leave those of each client with it.

    lr_scale  multiple of train.lr at which the weights learn
    weights   "examples" weighs a client by its training examples, "uniform" gives all the same

    Embeddings are the weights whose name says so (word, position and token-type ones; not the layer norm after them).
    They start from the backbone's, as a client's do that never took part. up = down = every other parameter.
    Deviation: the paper pre-trains with vocabularies of the clients' own; here all share the backbone's tokenizer.

    Source: Iacob et al. 2025, section 2.1 and Algorithm 1; Lee et al. 2025a, Table 4; docs/methods/dept.md.
    """
    shared = slot("shared")
    return Recipe(
        layout=whole("shared"),
        passes=(Pass(shared, ("shared",), rates=((shared, lr_scale),)),),
        share=shared & ~embeddings(),
        merge=Merge(weights),
        use=Use(("shared",)),
    )
