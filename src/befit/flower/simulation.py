"""All sites of a federation on one machine, under Flower's simulation runtime: Ray's processes are the nodes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from befit.config.experiment import Experiment
from befit.config.load import load_experiment
from befit.core.errors import PayloadMismatch
from befit.core.names import folder_name
from befit.data.files.client_files import columns_by_client, files_of
from befit.flower.client_app import answering
from befit.flower.own_slots import own_slots
from befit.flower.policy import models_told, place_told, settings_of
from befit.flower.remote_clients import client_ids
from befit.flower.service import SiteService
from befit.flower.site_file import Limits, SiteFile
from befit.flower.site_hosts import SiteHosts
from befit.protocol.registry import build_method
from befit.runs.loading import load_federation, resolve_model

_MOST = 2**62
# All is on one machine, and of one person.
_NONE = Limits(
    min_records=1,
    min_batch=1,
    max_batch=_MOST,
    max_length=_MOST,
    max_rounds=_MOST,
    max_steps=_MOST,
    max_rank=_MOST,
    max_runs=_MOST,
    max_state_gib=float(_MOST),
)


def simulated_app(config: Path) -> ClientApp:
    """The app of one configuration whose data is on this machine. Node number i is client number i.

    What a site keeps goes to `<out>-sites/<client>`, where `out` is Flower's run setting.
    """

    def serve(context: Context, request: bytes) -> bytes:
        place = context.node_config
        if "site" in place or not {"partition-id", "num-partitions"} <= place.keys():
            # before anything is read: what a simulation may read is for the server's configuration to say
            raise PayloadMismatch("this app was written with --simulation, and a site does not run it")
        number, count = int(place["partition-id"]), int(place["num-partitions"])
        service = _service(str(config), str(Path(str(context.run_config["out"])).expanduser()))
        return service.answer_as(number, count, request)

    app = ClientApp()

    @app.query()
    @app.train()
    @app.evaluate()
    def answer(message: Message, context: Context) -> Message:
        return answering(message, context, serve)

    return app


@lru_cache(maxsize=1)
def _service(config: str, out: str) -> SimulatedService:
    """One for each of Ray's processes, which live as long as the run: Flower makes the app anew for every message."""
    return SimulatedService(load_experiment(Path(config)), Path(out))


class SimulatedService(SiteService):
    """Answers for every client of a federation, from one backbone for each family. Each client has a site's file and a
    memory of its own, and is asked, allows, refuses and lists what leaves as a site elsewhere does."""

    def __init__(self, experiment: Experiment, out: Path) -> None:
        self._sites = sites_of(experiment, out)
        super().__init__(self._sites[0], SiteHosts(load_federation(experiment)))

    def answer_as(self, number: int, count: int, request: bytes) -> bytes:
        """The reply of client `number`, counted from 0, of `count` nodes. Raises PayloadMismatch for another count than
        that of the clients."""
        if count != len(self._sites):
            wanted = f"--federation-config 'num-supernodes={len(self._sites)}'"
            raise PayloadMismatch(f"{count} nodes cannot be {len(self._sites)} clients: use {wanted}")
        self.site = self._sites[number]
        return self.answer(request)


def sites_of(experiment: Experiment, out: Path) -> list[SiteFile]:
    """A site's file for each client, in the order that decides cohorts. It allows what the experiment asks for."""
    experiment = resolve_model(experiment)
    data, benchmark = experiment.data, experiment.benchmark
    columns = {} if data is None else columns_by_client(data.clients, data.columns)
    places: dict[str, Any] = data.clients if data is not None and isinstance(data.clients, dict) else {}
    blocks, settings = experiment.blocks, settings_of(experiment)
    return [
        SiteFile(
            client,
            data=files_of(places.get(client)),
            columns=dict(columns.get(client, {})),
            models={model["id"]: place_told(model) for model in models_told(settings, client)},
            benchmarks={} if benchmark is None else {benchmark.name: dict(benchmark.arguments)},
            shares=[slot for block in blocks for slot in own_slots(build_method(block))],
            scores="exact",
            limits=_NONE,
            plugins=experiment.plugins,
            device=experiment.model.device,
            threads=experiment.engine.threads,
            state=str(out.with_name(f"{out.name}-sites") / folder_name(client)),
            errors="text",
        )
        for client in client_ids(experiment)
    ]
