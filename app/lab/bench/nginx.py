"""nginx as the yardstick: one worker, kept-alive upstream, nothing that the gateway lacks."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from app.cluster.embedded import free_port
from app.lab.bench.cpu import Cores, family
from app.lab.bench.peers import Peer
from app.lab.bench.processes import BenchError, accepts, running

# Buffering off, because a gateway hands on what it reads at once. Keep-alive without a limit of
# requests, because nginx would otherwise reconnect every thousand and the gateway would not.
CONFIG = """\
{user}
worker_processes 1;
pid {prefix}/nginx.pid;
error_log {prefix}/error.log warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    tcp_nodelay on;
    keepalive_timeout 300s;
    keepalive_requests 1000000000;
    client_body_temp_path {prefix}/client_body;
    proxy_temp_path {prefix}/proxy;
    fastcgi_temp_path {prefix}/fastcgi;
    uwsgi_temp_path {prefix}/uwsgi;
    scgi_temp_path {prefix}/scgi;
    upstream backend {{
        server {upstream};
        keepalive 512;
        keepalive_timeout 300s;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://backend;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@contextmanager
def nginx(upstream: str, scratch: Path, cores: Cores, name: str = "nginx") -> Iterator[Peer]:
    """nginx in front of `upstream`, all its files under the scratch directory."""
    prefix = scratch / name
    prefix.mkdir()
    port = free_port()
    config = prefix / "nginx.conf"
    config.write_text(
        CONFIG.format(
            user=_user_directive(), prefix=prefix, upstream=urlsplit(upstream).netloc, port=port
        )
    )
    command = [_binary(), "-p", str(prefix), "-c", str(config), "-e", str(prefix / "error.log")]
    command += ["-g", "daemon off;"]
    with running(name, command, scratch, cores.measured) as child:
        child.wait_until(lambda: accepts(port) and len(family(child.pid)) > 1, "worker")
        yield Peer(name, f"http://127.0.0.1:{port}", family(child.pid))


def _binary() -> str:
    # Debian keeps it in /usr/sbin, which is not on everyone's path.
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise BenchError(
            "nginx is not installed, and the bench measures beside it: apt-get install nginx-light"
        )
    return found


def _user_directive() -> str:
    """Started by root, nginx would hand its worker to a user who cannot read the scratch files."""
    return "" if os.geteuid() else "user root;"
