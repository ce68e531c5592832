"""nginx in front of a replica, as an operator would put it there: all its defaults."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from app.cluster.embedded import die_with_parent, free_port
from tests.support.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

# Debian keeps it in /usr/sbin, which is not on everyone's path.
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
MISSING = "nginx is not installed: apt-get install nginx-light"

# Paths aside, which must not be the system's, this is a configuration of one directive.
_CONFIG = """\
{user}
daemon off;
pid {prefix}/nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {prefix}/client_body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://127.0.0.1:{upstream};
            {more}
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(upstream: int, more: str = "") -> Iterator[int]:
    """An nginx before the port ``upstream``: its own port. ``more``: directives of the location."""
    assert NGINX is not None, MISSING
    port = free_port()
    # Started by root, nginx would hand its worker to a user who cannot read the folder.
    user = "" if os.geteuid() else "user root;"
    with tempfile.TemporaryDirectory(prefix="leaseway-nginx-") as prefix:
        config, log = Path(prefix, "nginx.conf"), Path(prefix, "error.log")
        config.write_text(
            _CONFIG.format(user=user, prefix=prefix, port=port, upstream=upstream, more=more)
        )
        process = subprocess.Popen(
            [NGINX, "-p", prefix, "-c", str(config), "-e", str(log)],
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl call
        )
        try:
            wait_until(lambda: process.poll() is not None or _accepts(port), what="nginx is up")
            assert process.poll() is None, f"nginx did not start: {log.read_text()}"
            yield port
        finally:
            process.terminate()
            process.wait(10)


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
