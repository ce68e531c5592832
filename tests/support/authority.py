"""A certificate authority for a test, by the ``openssl`` command."""

from __future__ import annotations

import ssl
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Authority:
    """A certificate authority of the test's own; ``ca.pem`` is what trusts it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "ca.pem"
        self._openssl(
            "req", "-x509", *self._new_key("ca"), "-out", "ca.pem", "-days", "2", "-subj",
            "/CN=a test", "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip

    def _openssl(self, *args: str) -> None:
        subprocess.run(["openssl", *args], cwd=self._folder, check=True, capture_output=True)

    @staticmethod
    def _new_key(name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        return [*curve, "-nodes", "-keyout", f"{name}.key"]

    def context(self, name: str) -> ssl.SSLContext:
        """A server's context with a certificate for ``name``, e.g. ``IP:127.0.0.1``."""
        extensions = self._folder / "extensions"
        extensions.write_text(f"subjectAltName={name}\n")
        self._openssl("req", *self._new_key("node"), "-out", "node.csr", "-subj", "/CN=node")
        self._openssl(
            "x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", "extensions", "-out", "node.pem",
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "node.pem", self._folder / "node.key")
        return context
