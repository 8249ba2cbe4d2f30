"""Who may see the console's pages, and what they may change: logins, TLS, forms."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from metamq.client.settings import ClusterAccess
from metamq.console import visitors as module
from metamq.console.command import Place
from metamq.console.visitors import Credentials, Visitors, credentials_of
from metamq.errors import AuthenticationFailed, ConfigError, MetamqError
from metamq.security.certificates import Authority
from metamq.testing import Cluster
from tests.console.test_console import Running, console, give_up
from tests.one_zookeeper import cluster
from tests.parts import SLOW_S, wait_until
from tests.security.certificate_folder import make_folder, secured

SETTLE_S = 0.5
PASSWORD = "correct horse: battery"


def basic(user: str, password: str) -> str:
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_folder(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[Cluster]:
    """With the users reader, who may read `orders`, and idle, who may nothing."""
    with cluster(security=secured(authority.folder, zookeeper_tls=False)) as one:
        for topic in ("orders", "secrets"):
            one.create_topic(topic, 1)
            with one.producer() as producer:
                producer.send(topic, f"a value of {topic}".encode()).result(SLOW_S)
        with one.admin() as admin:
            for name in ("reader", "idle"):
                admin.set_user(name, PASSWORD)
            admin.add_rules("allow", "reader", "read", "topic:orders")
        yield one


@pytest.fixture(scope="module")
def shown(secure: Cluster, authority: Authority) -> Iterator[Running]:
    ca = str(authority.folder / "ca.crt")
    with console(secure, "--login", METAMQ_SECURITY_CA=ca, METAMQ_SECURITY_ZOOKEEPER_TLS="false") as running:
        wait_until(
            lambda: running.ask("/messages?name=orders", Authorization=basic("reader", PASSWORD)).status == 200,
            what="the user and its rules at the broker",
        )
        yield running


@pytest.mark.parametrize(
    "header",
    [
        "", basic("reader", "wrong"), basic("unknown", PASSWORD), basic("reader", ""), basic("", PASSWORD),
        "Basic ???", "Basic /w==", "Bearer x", basic("admin", PASSWORD), basic("reader\0x", PASSWORD),
    ],
)  # fmt: skip
@pytest.mark.parametrize("page", ["/", "/topics", "/messages?name=orders"])
def test_without_a_valid_login_nothing_is_shown(shown: Running, header: str, page: str) -> None:
    answer = shown.ask(page, **({"Authorization": header} if header else {}))
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert "a value of" not in answer.body
    assert "partitions" not in answer.body


def test_a_visitor_sees_what_its_user_may_see(shown: Running) -> None:
    reader = basic("reader", PASSWORD)
    assert "a value of orders" in shown.ask("/messages?name=orders", Authorization=reader).body
    refused = shown.ask("/messages?name=secrets", Authorization=reader)
    assert "a value of" not in refused.body
    assert "may not" in unescape(refused.body)
    assert "may not describe cluster" in unescape(shown.ask("/brokers", Authorization=reader).body)
    idle = shown.ask("/messages?name=orders", Authorization=basic("idle", PASSWORD))
    assert "a value of" not in idle.body
    assert "'idle' may not read topic:orders" in unescape(idle.body)


def in_process(secure: Cluster, authority: Authority) -> Visitors:
    """Visitors in this process; their doctor finds nothing."""
    own = secured(authority.folder, zookeeper_tls=False)
    access = ClusterAccess(secure.zookeeper, security=own)
    return Visitors(access, None, lambda _access: lambda _report: True, with_login=True)


def test_a_new_password_ends_the_old_login(
    secure: Cluster, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERIFIED_S", 0.0)
    given = Credentials("changing", PASSWORD)

    async def use() -> None:
        visitors = in_process(secure, authority)
        async with visitors.open():
            first = await known(visitors, given)
            assert await visitors.view_of(given) is first
            with secure.admin() as admin:
                admin.set_user("changing", "another password")
            await until_refused(visitors, given)
            assert await known(visitors, Credentials("changing", "another password")) is not first

    with secure.admin() as admin:
        admin.set_user("changing", PASSWORD)
    asyncio.run(use())


async def known(visitors: Visitors, given: Credentials) -> Any:
    """The view of a user whom the broker may not know yet."""
    async with asyncio.timeout(SLOW_S):
        while True:
            try:
                return await visitors.view_of(given)
            except AuthenticationFailed:
                await asyncio.sleep(0.05)


async def until_refused(visitors: Visitors, given: Credentials) -> None:
    with contextlib.suppress(AuthenticationFailed):
        async with asyncio.timeout(SLOW_S):
            while True:
                await visitors.view_of(given)
                await asyncio.sleep(0.05)


def test_only_so_many_visitors_have_a_view(
    secure: Cluster, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VISITORS_MAX", 1)

    async def use() -> None:
        visitors = in_process(secure, authority)
        async with visitors.open():
            first = await known(visitors, Credentials("reader", PASSWORD))
            await known(visitors, Credentials("idle", PASSWORD))
            with pytest.raises(MetamqError):
                await first.admin.topics()
            assert await known(visitors, Credentials("reader", PASSWORD)) is not first

    asyncio.run(use())


@pytest.mark.slow
def test_a_known_visitor_may_look_while_no_broker_answers(
    secure: Cluster, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERIFIED_S", 0.0)

    async def use() -> None:
        visitors = in_process(secure, authority)
        async with visitors.open():
            view = await known(visitors, Credentials("reader", PASSWORD))
            with secure.freeze(secure.broker):
                assert await visitors.view_of(Credentials("reader", PASSWORD)) is view
                with pytest.raises(MetamqError, match="no broker answers"):
                    await visitors.view_of(Credentials("idle", PASSWORD))

    asyncio.run(use())


def test_credentials_of_a_header() -> None:
    assert credentials_of(basic("anna", "a:b ü")) == Credentials("anna", "a:b ü")
    assert credentials_of(basic("anna", "x").replace("Basic", "bAsIc")) == Credentials("anna", "x")


def test_the_pages_by_tls(secure: Cluster, authority: Authority) -> None:
    authority.issue("console", ["127.0.0.1"])
    files = [str(authority.folder / f"console.{kind}") for kind in ("crt", "key")]
    own = {
        "METAMQ_SECURITY_DIR": str(authority.folder), "METAMQ_SECURITY_ROLE": "admin",
        "METAMQ_SECURITY_ZOOKEEPER_TLS": "false",
    }  # fmt: skip
    with console(secure, "--login", "--certificate", files[0], "--key", files[1], **own) as running:
        assert running.url.startswith("https://127.0.0.1:")
        request = urllib.request.Request(f"{running.url}topics", headers={"Authorization": basic("reader", PASSWORD)})
        context = ssl.create_default_context(cafile=str(authority.folder / "ca.crt"))
        with urllib.request.urlopen(request, timeout=SLOW_S, context=context) as page:
            assert b"secrets" in page.read()


@pytest.mark.parametrize(
    ("options", "is_secure", "expected"),
    [
        ({}, False, False),
        ({}, True, False),
        ({"login": True}, True, True),
        ({"login": True}, False, "needs a cluster with security"),
        ({"host": "0.0.0.0"}, False, False),
        ({"host": "0.0.0.0"}, True, "without TLS"),
        ({"host": "0.0.0.0", "plain_http": True}, True, True),
        ({"host": "::", "certificate": "c", "key": "k"}, True, True),
        ({"certificate": "c"}, True, "belong together"),
        ({"key": "k"}, False, "belong together"),
    ],
)
def test_options_that_fit_together(options: dict[str, Any], is_secure: bool, expected: bool | str) -> None:
    none: dict[str, Any] = {
        "host": "127.0.0.1", "names": (), "login": False, "certificate": None, "key": None, "plain_http": False,
    }  # fmt: skip
    place = Place(**{**none, **options})
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            place.with_login(is_secure)
    else:
        assert place.with_login(is_secure) is expected


def test_another_name_of_the_console() -> None:
    with cluster() as one, console(one, "--host", "0.0.0.0", "--name", "console.example") as running:
        assert re.fullmatch(r"http://console\.example:\d+/", running.url)
        local = Running(one, running.url.replace("console.example", "127.0.0.1"))
        assert local.ask("/topics", Host="console.example").status == 200
        assert local.ask("/topics", Host="0.0.0.0").status == 200
        assert local.ask("/topics", Host="other.example").status == 400


@pytest.fixture(scope="module")
def changing() -> Iterator[Running]:
    with cluster() as one, console(one, "--allow-changes") as running:
        yield running


def form_of(page: str) -> dict[str, str]:
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))


def test_dead_letters_are_sent_again(changing: Running) -> None:
    give_up(changing.cluster)
    letters = unescape(changing.ask("/letters?name=failing").body)
    (path,) = re.findall(r'"(/resend\?name=failing&id=[^"]+)"', letters)
    form = form_of(changing.ask(path).body)
    assert form.keys() == {"token", "name", "id"}
    body = "&".join(f"{name}={value}" for name, value in form.items())
    assert "1 letter was sent again" in changing.ask("/resend", "POST", body).body
    assert "0 letters were sent again" in changing.ask("/resend", "POST", body).body
    assert "no dead letters that wait" in changing.ask("/letters?name=failing").body
    with changing.cluster.consumer(topics="odd", start="earliest", idle_timeout_s=SETTLE_S) as consumer:
        assert [message.value for message in consumer] == [b'{"total": 17}'] * 2


@pytest.mark.parametrize("token", ["", "0" * 64, "\u00fc"])
def test_a_form_of_another_site_is_refused(changing: Running, token: str) -> None:
    refused = changing.ask("/resend", "POST", f"name=failing&token={token}".encode().decode("latin-1"))
    assert (refused.status, "is not of this console" in refused.body) == (403, True)


def test_wrong_forms_are_explained(changing: Running) -> None:
    assert changing.ask("/resend", "POST", "x" * 20_000).status == 413
    token = form_of(changing.ask("/resend?name=unknown").body)["token"]
    assert changing.ask("/resend", "POST", f"name=unknown&token={token}").status == 404
    assert changing.ask("/topics", "POST", f"token={token}").status == 405


def test_the_page_of_the_status_port_leads_to_the_console(tmp_path: Path) -> None:
    url = 'http://127.0.0.1:8180/"><script>'
    with cluster(console_url=url, folder=tmp_path / "cluster") as one:
        with urllib.request.urlopen(f"http://127.0.0.1:{one.broker.http_port}/", timeout=SLOW_S) as page:
            text = page.read().decode()
        assert url in unescape(text)
        assert "<script>" not in text
        assert 'href="/metrics"' in text
