"""The same run on many machines, with Flower as the engine.

At the server                                         At a site
at_sites.py        a run whose clients are sites      site_file.py    a site's own file
engine.py          the engine, over any link          policy.py       what may travel, and what a site agrees to
remote_clients.py  who the clients are, from afar     requests.py     what a request has to be
replies.py         what a reply may say               service.py      what a site answers
app_folder.py      what `flwr run` starts             site_state.py   what a site keeps, in a folder of its own
server_app.py      Flower's ServerApp                 client_app.py   Flower's ClientApp
link.py            frames over Flower's Grid          worker.py       a resident service; call.py asks it
members.py         which node is which client         agreement.py    what a run is at a site, once it has begun
run_log.py         what is shown of a run             amounts.py      how much a server may ask
                                                      consent.py      what leaves, and what of it needs a yes
                                                      budget.py       what a site has spent of its privacy
                                                      site_hosts.py   its data and backbone, from run to run
                                                      site_reply.py   what a site tells, and the list of that
                                                      executor.py     processes for messages, at a slow site

At both: frame.py (requests and replies as bytes), keys.py (certificates and keys), doctor.py and doctor_server.py (what
is wrong at a site and at the server, and how to mend it), checklist.py (what to look at before real records), untold.py
(which sites will tell no score), own_slots.py (what a method makes a site send), consortium.py and consortium_folder.py
(all files from one), commands.py (how Flower's processes are started), simulation.py (all sites on one machine). Only
server_app, client_app, link, executor and frame's record functions import Flower.
"""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy

if TYPE_CHECKING:
    from befit.flower.at_sites import hello, run_at_sites
    from befit.flower.engine import checked
    from befit.flower.remote_clients import RemoteClients
    from befit.flower.service import SiteService
    from befit.flower.site_file import SiteFile, load_site

__all__ = ["RemoteClients", "SiteFile", "SiteService", "checked", "hello", "load_site", "run_at_sites"]

__getattr__, __dir__ = lazy(__name__, __file__)
