"""`sglang-capture serve`: the side service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    host: Annotated[str | None, typer.Option(help="the address to listen on [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="the port; 0 takes a free one [default: 30080]")] = None,
    spool: Annotated[
        Path | None, typer.Option(help="the server's spool [default: /dev/shm/sglang_capture]", metavar="DIR")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="where catalog, datasets and exports are kept [default: captures]", metavar="DIR"),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="SGLang's URL [default: as the plugin says]", metavar="URL")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="say where it listens as one line of JSON")] = False,
) -> None:
    """Run the side service: it indexes dumps, packs them into shards, and answers /capture over HTTP.

    It runs on the machine of the SGLang server, and may start before it. Every option, and what has none here, can be
    set as an environment variable (docs/service.md). Stop it with Ctrl-C: it goes on where it was at the next start.

    Example: `sglang-capture serve --data /data/captures`
    """
    import contextlib
    import json
    import logging
    import signal

    from sglang_capture.commands._output import say
    from sglang_capture.service.server import ServiceServer
    from sglang_capture.service.settings import service_settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "watchfiles"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings = service_settings(host=host, port=port, dir=spool, data=data, server=server)
    running = ServiceServer(settings)
    where = {"url": running.url, "spool": str(settings.dir), "data": str(settings.data.absolute())}
    if as_json:
        print(json.dumps(where), flush=True)
    else:
        say(f"listening on {where['url']} (routes: {where['url']}/docs)", "ok")
        say(f"spool {where['spool']}, data {where['data']}")
    # The server stops orderly on both signals, and hands them on afterwards.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with contextlib.suppress(KeyboardInterrupt):
        running.run()
