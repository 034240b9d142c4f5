"""Serving over TLS: the files, what is wrong with them, and the context made of them. Knows no HTTP and no sockets."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from ropeway.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where the server's certificate is, in PEM.

    certfile: the certificate and those that lead to its authority. keyfile: its private key; None where certfile holds
    that too. keyfile_password: of an encrypted key. ca_certs: authorities of clients. client_certificates: whether
    clients are asked for a certificate (optional) or turned away without one (required).
    """

    certfile: Path
    keyfile: Path | None = None
    keyfile_password: str | None = field(default=None, repr=False)
    ca_certs: Path | None = None
    client_certificates: ssl.VerifyMode = ssl.CERT_NONE


class TlsContext:
    """The context that connections are accepted with. Raises ConfigError for files that do not serve."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = _loaded(files)

    def reload(self) -> None:
        """Takes the certificate as the files have it now, for the connections to come.

        Raises ConfigError where it cannot be used; then the one in use stays.
        """
        _loaded(self._files)  # into a context of its own first: a failure half way must not touch the one in use
        _load_chain(self.context, self._files)


def _loaded(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, files)
    if files.client_certificates != ssl.CERT_NONE and files.ca_certs is None:
        raise ConfigError("--ssl-cert-reqs asks clients for certificates: name their authorities with --ssl-ca-certs")
    if files.ca_certs is not None:
        try:
            context.load_verify_locations(files.ca_certs)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"--ssl-ca-certs {files.ca_certs} cannot be used: {_reason(error)}") from None
        context.verify_mode = files.client_certificates
    return context


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    for flag, path in (("--ssl-certfile", files.certfile), ("--ssl-keyfile", files.keyfile)):
        if path is not None:
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from None

    is_asked = False

    def password() -> str:
        # Without this OpenSSL would ask at the terminal, and wait.
        nonlocal is_asked
        is_asked = True
        if files.keyfile_password is None:
            raise ConfigError("the private key is encrypted: give --ssl-keyfile-password, or ROPEWAY_SSL_PASSWORD")
        return files.keyfile_password

    try:
        context.load_cert_chain(files.certfile, files.keyfile, password)
    except OSError as error:
        if is_asked:
            raise ConfigError(f"--ssl-keyfile-password does not open the private key in {_key(files)}") from None
        raise ConfigError(_chain_problem(files, error)) from None


def _chain_problem(files: TlsFiles, error: OSError) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"the private key in {_key(files)} is not that of the certificate in {files.certfile}"
    hint = "" if files.keyfile is not None else "; a key in a file of its own is named with --ssl-keyfile"
    return f"--ssl-certfile {files.certfile} and its key in {_key(files)} cannot be used: {_reason(error)}{hint}"


def _key(files: TlsFiles) -> Path:
    return files.keyfile or files.certfile


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    if isinstance(error, ssl.SSLError):
        return str(reason).lower().replace("_", " ") if reason else "no PEM of the right kind is in them"
    return error.strerror or str(error)
