"""Logins by tokens of an OAuth authority, whose public keys a broker has in a file."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from metamq import Consumer, Producer, SecurityConfig
from metamq.client.net.blocking_connection import BlockingConnection
from metamq.errors import AuthenticationFailed, ConfigError
from metamq.security.bearer import BEARER, LEEWAY_S, TOKEN_BYTES_MAX, TokenLogin, TokenVerifier
from metamq.security.certificates import Authority
from metamq.security.tls import client_security, token_verifier
from metamq.testing import Cluster
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, read_to_end, wait_until
from tests.security.certificate_folder import client_of, secured

AUDIENCE, ISSUER = "metamq", "https://login.example"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
CURVE = ec.generate_private_key(ec.SECP256R1())
SECRET = "0123456789abcdef0123456789abcdef"


def jwk(key: Any, name: str = "") -> dict[str, Any]:
    algorithm: Any = ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else RSAAlgorithm
    found: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {**found, "kid": name} if name else found


def write_keys(path: Path, *keys: dict[str, Any]) -> None:
    replacement = path.with_suffix(".new")
    replacement.write_text(json.dumps({"keys": keys}))
    replacement.rename(path)


def token(key: Any = RSA, *, in_s: float = 60, name: str | None = None, algorithm: str = "RS256", **claims: Any) -> str:
    content = {"sub": "etl", "aud": AUDIENCE, "iss": ISSUER, "exp": time.time() + in_s, **claims}
    content = {claim: value for claim, value in content.items() if value is not None}
    return jwt.encode(content, key, algorithm=algorithm, headers={"kid": name} if name else None)


def by_hand(algorithm: str, secret: bytes) -> str:
    """A token that the library would not make: signed by HMAC, or without a secret not at all."""
    content = {"sub": "etl", "aud": AUDIENCE, "iss": ISSUER, "exp": time.time() + 60}
    parts = [json.dumps(part).encode() for part in ({"alg": algorithm, "typ": "JWT"}, content)]
    signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = hmac.digest(secret, signed, "sha256") if secret else b""
    return f"{signed.decode()}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    write_keys(path, jwk(RSA, "first"), jwk(CURVE, "second"))
    return path


def settings(keys: Path, **more: str) -> SecurityConfig:
    return replace(SecurityConfig(jwks=str(keys), audience=AUDIENCE, issuer=ISSUER), **cast(Any, more))


def verified(verifier: TokenVerifier, text: str) -> str:
    mechanism, message = TokenLogin("broker", text).first(["SCRAM-SHA-256-PLUS", BEARER])
    assert mechanism == BEARER
    return verifier.verify(message, "10.0.0.1:5").principal


def test_tokens_of_each_key(keys: Path) -> None:
    verifier = token_verifier(settings(keys))
    assert verified(verifier, token()) == "etl"
    assert verified(verifier, token(CURVE, algorithm="ES256", name="second")) == "etl"
    assert verified(verifier, token(aud=["other", AUDIENCE])) == "etl"
    assert verified(token_verifier(settings(keys, user_claim="azp")), token(azp="report")) == "report"
    assert verified(token_verifier(settings(keys, issuer="")), token(iss="https://elsewhere")) == "etl"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (lambda: token(OTHER), "the token is not valid"),
        (lambda: token(OTHER, name="first"), "the token is not valid"),
        (lambda: token(name="unknown"), "the token is not valid"),
        (lambda: token(in_s=-LEEWAY_S - 1), "the token has expired. Renew the token file"),
        (lambda: token(exp=None), "the token is not valid"),
        (lambda: token(nbf=time.time() + 60), "the token is not valid"),
        (lambda: token(aud="elsewhere"), "the token is for another audience"),
        (lambda: token(aud=None), "the token is not valid"),
        (lambda: token(iss="https://elsewhere"), "the token is not valid"),
        (lambda: token(SECRET, algorithm="HS256"), "the token is not valid"),
        (lambda: by_hand("none", b""), "the token is not valid"),
        (lambda: token()[:-4] + "AAAA", "the token is not valid"),
        (lambda: "nothing", "the token is not valid"),
        (lambda: token(sub=None), "its claim 'sub' cannot be the name of a user"),
        (lambda: token(sub="admin"), "its claim 'sub' cannot be the name of a user"),
        (lambda: token(sub="brokers"), "its claim 'sub' cannot be the name of a user"),
        (lambda: token(sub="a b"), "its claim 'sub' cannot be the name of a user"),
    ],
)  # fmt: skip
def test_a_token_that_is_refused(keys: Path, text: Any, said: str) -> None:
    with pytest.raises(AuthenticationFailed) as refused:
        verified(token_verifier(settings(keys)), text())
    assert said in str(refused.value)


def test_a_public_key_is_no_shared_secret(keys: Path) -> None:
    """The classic forgery: a token that is signed by HMAC, with the text of the public key as its secret."""
    write_keys(keys, jwk(RSA), {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"})
    for secret in (json.dumps(jwk(RSA)).encode(), b"secret"):
        forged = by_hand("HS256", secret)
        with pytest.raises(AuthenticationFailed, match="the token is not valid"):
            verified(token_verifier(settings(keys)), forged)


@pytest.mark.parametrize("message", [b"", b"n,,", b"n,,\x01auth=Basic x\x01\x01", b"p=x,,\x01auth=Bearer x\x01\x01"])
def test_a_message_that_is_none(keys: Path, message: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="not one of OAUTHBEARER"):
        token_verifier(settings(keys)).verify(message, "10.0.0.1:5")


def test_keys_are_read_again_and_broken_ones_change_nothing(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    verifier = token_verifier(settings(keys))
    keys.write_text("no JSON")
    assert verified(verifier, token()) == "etl"
    assert "tokens are still verified with the former keys: " in caplog.text
    write_keys(keys, jwk(OTHER))
    assert verified(verifier, token(OTHER)) == "etl"
    with pytest.raises(AuthenticationFailed):
        verified(verifier, token())
    keys.unlink()
    assert verified(verifier, token(OTHER)) == "etl"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "AAAA"}]}'])
def test_a_file_without_public_keys(keys: Path, text: str) -> None:
    keys.write_text(text)
    with pytest.raises(ConfigError, match=r"the file .*jwks\.json has no "):
        token_verifier(settings(keys))


def test_settings_that_do_not_fit(keys: Path) -> None:
    with pytest.raises(ConfigError, match="`audience` is missing"):
        SecurityConfig(jwks=str(keys))
    with pytest.raises(ConfigError, match="a user and a token"):
        SecurityConfig(ca="ca", user="etl", password_file="p", token_file="t")
    with pytest.raises(ConfigError, match="without the authority"):
        SecurityConfig(token_file="t")
    with pytest.raises(ConfigError, match=f"the limit is {TOKEN_BYTES_MAX:,}"):
        TokenLogin("broker", "x" * (TOKEN_BYTES_MAX + 1)).first([BEARER])
    with pytest.raises(AuthenticationFailed, match="it takes no tokens"):
        TokenLogin("broker", "x").first(["SCRAM-SHA-256-PLUS"])
    assert SECRET not in repr(TokenLogin("broker", SECRET))


# -- a real broker ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_keys(folder / "jwks.json", jwk(RSA))
    return folder


@pytest.fixture(scope="module")
def running(authority: Authority, files: Path) -> Iterator[Cluster]:
    security = replace(
        secured(authority.folder, zookeeper_tls=False),
        jwks=str(files / "jwks.json"), audience=AUDIENCE, issuer=ISSUER,
    )  # fmt: skip
    with cluster(security=security) as made, made.admin() as admin:
        made.create_topic("t", partitions=1)
        for right in ("read", "write"):
            admin.add_rules("allow", "etl", right, "topic:t")
        yield made


def by_token(authority: Authority, files: Path, text: str) -> SecurityConfig:
    (files / "token").write_text(text)
    return replace(client_of(authority.folder), token_file=str(files / "token"), zookeeper_tls=False)


@pytest.mark.slow
def test_a_program_with_a_token(running: Cluster, authority: Authority, files: Path) -> None:
    """Its connections end with the token, and new ones use the newer token in the file."""
    security = by_token(authority, files, token(in_s=-LEEWAY_S + 3))
    with Producer(running.zookeeper, security=security, linger_ms=0) as producer:
        producer.send("t", b"0").result(SLOW_S)
        (files / "token").write_text(token(in_s=600))
        expired = "the token of etl has expired: closed"
        wait_until(lambda: expired in running.broker.log_path.read_text(), what="the end")
        producer.send("t", b"1").result(SLOW_S)
    with Consumer(running.zookeeper, topics="t", start="earliest", idle_timeout_s=1, security=security) as consumer:
        assert [message.value for message in read_to_end(consumer)] == [b"0", b"1"]


def test_a_bad_token_is_told(running: Cluster, authority: Authority, files: Path) -> None:
    security = by_token(authority, files, token(OTHER))
    for _ in range(2):
        with pytest.raises(AuthenticationFailed, match="the token is not valid"):
            BlockingConnection.open(
                "127.0.0.1", running.broker.port, security=client_security(security).brokers, timeout_s=SLOW_S
            )
