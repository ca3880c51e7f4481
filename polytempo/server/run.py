"""Runs the app on uvicorn: the first signal drains, the second ends at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from polytempo.server.app import ServerSettings


class DrainingServer(uvicorn.Server):
    """uvicorn, but a second signal of any kind does not wait, and a drained end is exit code 0."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal; end the process at the second."""
        name = signal.Signals(sig).name
        if self.should_exit:
            print(f"{name} again: ending at once", file=sys.stderr, flush=True)
            os._exit(128 + sig)
        print(f"{name}: finishing what runs, taking nothing new; once more ends at once", file=sys.stderr, flush=True)
        self.should_exit = True


def serve(app: Starlette, host: str, port: int, settings: ServerSettings) -> None:
    """Serve until a signal ends it.

    Args:
        app: from `make_app`.
        host: address to listen on.
        port: 0 takes a free one.
        settings: gives the time to drain.
    """
    config = uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, lifespan="on", server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout)),
    )  # fmt: skip
    DrainingServer(config).run()
