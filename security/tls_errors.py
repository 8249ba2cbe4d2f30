"""The reason of a TLS handshake that failed, in words."""

from __future__ import annotations

import ssl

NO_TLS = "it does not speak TLS", "If security is off at the broker, unset METAMQ_SECURITY_CA and METAMQ_SECURITY_DIR."
ENDED = (
    "it closed the connection in the TLS handshake",
    "It may reject this client's certificate, or its version of TLS: the broker's log has the reason.",
)
"""A broker cannot send the reason: TLS 1.3 verifies a client's certificate after the client's end is done."""
_REASONS = {
    "WRONG_VERSION_NUMBER": NO_TLS,
    "HTTP_REQUEST": NO_TLS,
    "UNEXPECTED_EOF_WHILE_READING": ENDED,
    "UNSUPPORTED_PROTOCOL": ("it does not speak TLS 1.3", ""),
}


def tls_reason(error: ssl.SSLError) -> tuple[str, str]:
    """Returns the reason why a handshake failed, as a part of a sentence about the other side, and the next step."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = error.verify_message.rstrip(".")
        hint = "Compare METAMQ_SECURITY_CA with the authority of the broker, and the host with its certificate's hosts."
        return f"its certificate is rejected: {problem[:1].lower()}{problem[1:]}", hint
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ENDED
    known = _REASONS.get(error.reason or "")
    return known or (f"the TLS handshake failed: {(error.reason or str(error)).replace('_', ' ').lower()}", "")
