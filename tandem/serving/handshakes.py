"""What is wrong with a certificate where gRPC does not say it: of a host's addresses it names the one it tried last."""

import socket
import ssl

from tandem.credentials import Credentials
from tandem.serving.channels import parse_address

_SEVERAL_ADDRESSES = "localhost"  # 127.0.0.1 and ::1, of which a server mostly has one; quick to ask both
_TIMEOUT_S = 0.5
_OTHER_NAME = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


def certificate_problem(address: str, credentials: Credentials) -> str | None:
    """Why a server at localhost:PORT is not believed, in gRPC's words, by a handshake with each of its addresses.

    None where there is no such problem, and for other hosts.
    """
    host, port = parse_address(address)
    if host != _SEVERAL_ADDRESSES:
        return None
    for *_, found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        problem = _problem_at(str(found[0]), port, credentials, host)
        if problem is not None:
            return problem
    return None


def _problem_at(number: str, port: int, credentials: Credentials, host: str) -> str | None:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cafile=credentials.tls_ca)
        with (
            socket.create_connection((number, port), _TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=credentials.tls_server_name or host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OTHER_NAME:
            return "Hostname Verification Check failed"
        return f"CERTIFICATE_VERIFY_FAILED: {error.verify_message}"
    except OSError:  # among them what else TLS finds wrong
        return None
