"""Flower's ClientApp at a site: hands the request to the resident worker, or to a desk of its own."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from befit.errors import ConfigError
from befit.flower.call import call
from befit.flower.records import from_content, to_content
from befit.flower.site_file import load_site

__all__ = ["app"]

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """The reply to any request of befit's server; see `befit.flower.desk.Desk` for what there is."""
    path = context.node_config.get("site")
    if not isinstance(path, str):
        raise ConfigError(
            ["start this SuperNode with --node-config 'site=\"/path/to/site.yaml\"'"], "the node's settings"
        )
    return Message(to_content(call(load_site(path), from_content(message.content))), reply_to=message)
