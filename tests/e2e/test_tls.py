"""TLS: served, renewed without a restart, asked of clients; and every wrong file told at start, in one line."""

from __future__ import annotations

import signal
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from openai import OpenAI
from tests.e2e.conftest import ENGINE_FLAGS
from tests.e2e.test_lifecycle import run_command
from tests.support.running_server import RunningServer, wait_until

PASSWORD = "0pen-sesame"


def write_certificate(folder: Path, authority: trustme.CA, name: str = "server", host: str = "127.0.0.1") -> Path:
    """NAME.pem and NAME.key in `folder`; the former's path."""
    issued = authority.issue_cert(host)
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    (folder / f"{name}.pem").write_bytes(chain)
    (folder / f"{name}.key").write_bytes(issued.private_key_pem.bytes())
    return folder / f"{name}.pem"


def trust(authority: trustme.CA, client: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client is not None:
        context.load_cert_chain(client, client.with_suffix(".key"))
    return context


def flags(certificate: Path) -> tuple[str, ...]:
    return ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(certificate.with_suffix(".key")))


def serial_number(url: str, context: ssl.SSLContext) -> str:
    with httpx.stream("GET", f"{url}/health", verify=context) as answer:
        return str(answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()["serialNumber"])


def test_serves_over_tls_and_takes_a_new_certificate(tiny_model_path: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = write_certificate(tmp_path, authority)
    context = trust(authority)
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *flags(certificate)) as server:
        assert server.url.startswith("https://")
        with (
            httpx.Client(verify=context) as http,
            OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
        ):
            whole = client.completions.create(model="tiny", prompt="a", max_tokens=8, temperature=0).choices[0].text
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=8, temperature=0, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == whole
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")  # signed by nobody that the machine knows
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")

        old = serial_number(server.url, context)
        certificate.write_text("not a certificate")
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: "the certificate stays as it was" in server.log())
        assert serial_number(server.url, context) == old
        write_certificate(tmp_path, authority)
        server.send_signal(signal.SIGHUP)
        wait_until(lambda: "read the certificate again" in server.log())
        assert serial_number(server.url, context) != old
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_clients_with_certificates_and_an_encrypted_key(tiny_model_path: Path, tmp_path: Path) -> None:
    authority, of_clients = trustme.CA(), trustme.CA()
    certificate = write_certificate(tmp_path, authority)
    key = certificate.with_suffix(".key")
    encryption = BestAvailableEncryption(PASSWORD.encode())
    private_key = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    of_clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    known = write_certificate(tmp_path, of_clients, "client", "someone.example")
    asking = ("--ssl-keyfile-password", PASSWORD, "--ssl-ca-certs", str(tmp_path / "clients.pem"))
    with RunningServer(tiny_model_path, *ENGINE_FLAGS, *flags(certificate), *asking) as server:
        assert httpx.get(f"{server.url}/health", verify=trust(authority, known)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health", verify=trust(authority))
        assert PASSWORD not in server.log()

    for password, message in ((), "ROPEWAY_SSL_PASSWORD"), (("--ssl-keyfile-password", "wrong"), "does not open"):
        result = run_command("serve", "--port", "0", *flags(certificate), *password)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1) and message in result.stderr


def test_wrong_files_are_told_at_start(tmp_path: Path) -> None:
    one = write_certificate(tmp_path, trustme.CA())
    other = write_certificate(tmp_path, trustme.CA(), "other")
    text = tmp_path / "text.pem"
    text.write_text("hello")
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--ssl-certfile", str(tmp_path / "none.pem")), "cannot be read: No such file"),
        (("--ssl-certfile", str(one), "--ssl-keyfile", str(other.with_suffix(".key"))), "is not that of"),
        (("--ssl-certfile", str(text)), "cannot be used"),
        (("--ssl-certfile", str(one)), "--ssl-keyfile"),
        (("--ssl-keyfile", str(one)), "give that too"),
        ((*flags(one), "--ssl-cert-reqs", "2"), "--ssl-ca-certs"),
        ((*flags(one), "--ssl-ca-certs", str(text)), "--ssl-ca-certs"),
    ]
    for arguments, message in cases:
        result = run_command("serve", "--port", "0", *arguments)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
        assert message in result.stderr, result.stderr
