"""What went wrong with a connection, in words for a log line."""

from __future__ import annotations

import os
import ssl

OTHER_AUTHORITY = "the two machines have certificates of different authorities"
_UNKNOWN_ISSUER = (7, 18, 19, 20, 21)  # OpenSSL's numbers: a signature that does not fit, or nobody known has signed
_ALERTS = {
    "TLSV1_ALERT_UNKNOWN_CA": f"the other end does not know who signed this one's: {OTHER_AUTHORITY}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other end wants a certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other end finds this one's certificate expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other end refuses this one's certificate",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the other end shows no certificate",
    "WRONG_VERSION_NUMBER": "the other end does not speak TLS",
    "HTTP_REQUEST": "the other end speaks HTTP",
}


def words(error: Exception) -> str:
    """The operating system's reason, without its number and address; TLS's in plain words where it is a common one."""
    if isinstance(error, ssl.SSLCertVerificationError):
        meaning = f": {OTHER_AUTHORITY}" if error.verify_code in _UNKNOWN_ISSUER else ""
        return f"TLS failed (certificate verify failed: {error.verify_message}{meaning})"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        return f"TLS failed ({_ALERTS.get(reason, reason)})"
    if isinstance(error, ConnectionResetError):  # event loops make one without a number
        return "connection reset by peer"
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number > 0:
        return os.strerror(number).lower()
    return str(error) or type(error).__name__
