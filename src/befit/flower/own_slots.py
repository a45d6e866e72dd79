"""Which slots a method makes a site send, and which of them are the site's own."""

from __future__ import annotations

from befit.adapters.keys import slot_of
from befit.flower.site_file import SiteFile
from befit.protocol.describe import ANY_MODEL
from befit.protocol.method import Method, run_stages

PERSONAL, SKETCH = "personal", "sketch"


def sent_slots(method: Method) -> list[str]:
    """Slots of all arrays that the method's clients send."""
    layout = method.layout.specs(ANY_MODEL)
    return sorted({slot_of(key) for stage in run_stages(method) for key in stage.reply.specs(layout)})


def own_slots(method: Method) -> list[str]:
    """Slots of the client's own that the method sends, which a site has to list under `shares`: adapters, and sketches,
    which are gradients of a few of its records.

    An adapter is a client's own where the server only takes it: no download ever replaces what was sent, or brings what
    rounds made of it. And where the method calls it personal, also if the server sends one back.
    """
    layout, stages = method.layout.specs(ANY_MODEL), run_stages(method)
    sent = {key for stage in stages for key in stage.reply.specs(layout)}
    replaced = {key for stage in stages for key in stage.down.specs(layout)}
    stands_for = [chosen for stage in stages for chosen in stage.down.selectors]
    replaced |= {key for key in layout if any(chosen(key) for chosen in stands_for)}
    adapters = {slot.name for slot in method.layout.slots}
    own = {slot_of(key) for key in sent - replaced if slot_of(key) in adapters}
    return sorted(own | ({PERSONAL, SKETCH} & {slot_of(key) for key in sent}))


def withheld(method: Method, site: SiteFile) -> list[str]:
    """Of the client's own slots that the method sends, those that the site does not share."""
    return [slot for slot in own_slots(method) if slot not in site.shares]
