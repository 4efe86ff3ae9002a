"""``knnper site serve`` in a process of its own."""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from knnper.client.install import SiteState
from knnper.data.examples import Examples
from knnper.data.site_data import NamedExamples, SiteData, SiteTask
from knnper.transport.credentials import issue_server_certificate, new_authority
from tests.client.service.small_service import (
    CLASSES,
    IMAGE,
    some_inputs,
    some_labels,
    tiny_model,
)

FILE = """
name: site-a
server: localhost:8443
insecure: true
data: {{name: image_folder, path: data}}
service: {{port: 0{tls}}}
"""


@contextlib.contextmanager
def serve_process(folder: Path, *, tls: bool = False) -> Iterator[httpx.Client]:
    """Give a client, which has the token, of ``knnper site serve`` in a process."""
    own = NamedExamples(Examples(some_inputs(6), some_labels(6)), tuple("abcdef"))
    none = NamedExamples(Examples(some_inputs(0), some_labels(0)), ())
    data = SiteData(own, none, none, SiteTask(IMAGE, CLASSES, ()))
    SiteState(folder / "state", "site-a").install(tiny_model(), data, took_part=False)
    config, authority = folder / "client.yaml", new_authority("tests")
    config.write_text(FILE.format(tls=", tls: {certificate: c, key: k}" if tls else ""))
    issue_server_certificate(authority, ["127.0.0.1"]).write(folder / "c", folder / "k")
    authority.write(folder / "ca", folder / "ca-key")
    with subprocess.Popen(
        [Path(sys.executable).with_name("knnper"), "site", "serve", config],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            address = next(line for line in lines if "serves at" in line).split()[-1]
            assert any("serving the model" in line for line in lines)
            token = (folder / "state" / "token").read_text().strip()
            with httpx.Client(
                base_url=address,
                headers={"Authorization": f"Bearer {token}"},
                verify=ssl.create_default_context(cafile=folder / "ca"),
                timeout=10,
            ) as client:
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(20) == 0
