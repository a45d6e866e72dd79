"""The same run on many machines, with Flower as the engine.

records.py     a frame of bytes as Flower's record   server_app.py  Flower's ServerApp
link.py        frames over Flower's Grid             client_app.py  Flower's ClientApp
-- only these four import Flower --
at_sites.py    a run whose clients are sites         desk.py        what a site answers
engine.py      the engine, over any link             consent.py     what a site agrees to
census.py      a federation seen from afar           memory.py      what a site keeps
frame.py       requests and replies as bytes         site_file.py   a site's own file
app_folder.py  what `flwr run` starts                worker.py      a resident desk; call.py asks it
keys.py        certificates and keys                 allowed.py     what of a configuration travels
demands.py     what a request has to be              replies.py     what a reply may say
claim.py       one state folder, one site            doctor.py       what is wrong at a site, and how to
finding.py     one thing the doctor looked at        doctor_server.py mend it; and at the server
"""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.flower.at_sites import hello, run_at_sites
    from befit.flower.engine import checked
    from befit.flower.service import Desk
    from befit.flower.site_file import SiteFile, load_site

__all__ = [
    "Desk",
    "SiteFile",
    "checked",
    "hello",
    "load_site",
    "run_at_sites",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "at_sites": "hello run_at_sites",
        "engine": "checked",
        "service": "Desk",
        "site_file": "SiteFile load_site",
    },
)
