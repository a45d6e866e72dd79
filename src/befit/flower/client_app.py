"""Flower's ClientApp at a site: hands the request to the resident worker, or to a service of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.plugins import ignore_entry_points
from befit.flower.call import call
from befit.flower.frame import from_content, to_content
from befit.flower.site_file import load_site

_LOG = logging.getLogger(__name__)

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """The reply to any request of befit's server; see `befit.flower.service.SiteService` for what there is."""

    def serve(context: Context, request: bytes) -> bytes:
        path = context.node_config.get("site")
        if not isinstance(path, str):
            raise ConfigError(["start this SuperNode with --node-config 'site=\"/path/to/site.yaml\"'"], "the node")
        ignore_entry_points()
        return call(load_site(path), request)

    return answering(message, context, serve)


def answering(message: Message, context: Context, serve: Callable[[Context, bytes], bytes]) -> Message:
    """What `serve` makes of a message's frame, as Flower's reply.

    Flower tells the server the text of an exception, so what is raised here names no place of the site.
    """
    try:
        return Message(to_content(serve(context, from_content(message.content))), reply_to=message)
    except Exception as error:
        _LOG.exception("this site cannot answer")
        text = str(error) if isinstance(error, PayloadMismatch) else "the site's log says more"
        raise RuntimeError(f"{type(error).__name__}: {text}") from None
