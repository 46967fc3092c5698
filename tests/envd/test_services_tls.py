"""TLS with certificates on both sides: who gets in, and moves between two such servers."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from envd.client import Access, ToolCall
from envd.errors import MigrationError, ServerUnavailable
from envd.operations.client import OperationsClient
from tests.envd.harness import FILES
from tests.ports import free_port

READ = ToolCall("read", {"path": "calc.py"})


def certificate(
    directory: Path, name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None, *hosts: str
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    dns = [x509.DNSName(host) for host in ("localhost", *hosts)]
    names = x509.SubjectAlternativeName([*dns, x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer[0].subject if issuer else subject)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    made = builder.add_extension(names, critical=False).sign(issuer[1] if issuer else key, hashes.SHA256())
    (directory / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (directory / f"{name}.key").write_bytes(key.private_bytes(*pem))
    return made, key


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[str]:
    """A server that asks for certificates, at the address that is yielded."""
    address = f"localhost:{free_port()}"
    own = ["--tls-cert", str(directory / "server.crt"), "--tls-key", str(directory / "server.key")]
    own += ["--tls-client-ca", str(directory / "ca.crt"), "--backend", "plain", "--log-level", "error"]
    command = [sys.executable, "-m", "envd", "serve", "--listen", address]
    server = subprocess.Popen([*command, *own, *options], stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        server.terminate()
        server.wait()


def test_tls_with_client_certificates_lets_only_those_in(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "client"):
        certificate(tmp_path, name, authority)
    certificate(tmp_path, "stranger", None)
    good = Access(tls_ca=tmp_path / "ca.crt", tls_cert=tmp_path / "client.crt", tls_key=tmp_path / "client.key")
    strangers = [
        Access(),
        Access(tls_ca=tmp_path / "ca.crt"),
        Access(tls_ca=tmp_path / "ca.crt", tls_cert=tmp_path / "stranger.crt", tls_key=tmp_path / "stranger.key"),
        Access(tls_ca=tmp_path / "stranger.crt", tls_cert=tmp_path / "client.crt", tls_key=tmp_path / "client.key"),
    ]

    async def job(address: str) -> None:
        async with OperationsClient(address, good) as client:
            assert await client.info()
        for access in strangers:
            async with OperationsClient(address, access) as client:
                client.caller._answered = True  # an error at once, not a wait for a server that starts
                with pytest.raises(ServerUnavailable):
                    await client.info()

    with serving(tmp_path) as address:
        asyncio.run(job(address))


def test_a_sandbox_moves_between_servers_that_ask_for_certificates(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "client"):
        certificate(tmp_path, name, authority)
    ours = Access(tls_ca=tmp_path / "ca.crt", tls_cert=tmp_path / "client.crt", tls_key=tmp_path / "client.key")

    async def job(first: str, second: str) -> None:
        async with OperationsClient(first, ours) as here, OperationsClient(second, ours) as there:
            sandbox = await here.create(await here.put_template(FILES))
            await there.info()  # it has started
            await sandbox.files.write("calc.py", b"moved\n")
            moved = await sandbox.migrate(there)
            assert (await moved.call(READ)).text == "1 moved"
            with pytest.raises(MigrationError, match="goes on here"):
                await moved.migrate(here)  # the second server was not told of an authority
            assert (await moved.call(READ)).ok

    with serving(tmp_path, "--peer-ca", str(tmp_path / "ca.crt")) as first, serving(tmp_path) as second:
        asyncio.run(job(first, second))
