"""The pages of the console, and the rules that every answer obeys.

Pages are read with GET, and change nothing. A change is a POST, from a form that only this console can have made.
Templates escape every value, so names and errors of other people are text. No page has a script, and none asks another
host.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn import Config, Server

import metamq
from metamq.cli.commands.tx import age_ms, next_steps, who_decides
from metamq.cli.messages.filters import all_of, parse_condition, parse_key
from metamq.cli.show.units import parse_place, show_age, show_bytes, show_flush, show_retention
from metamq.client.delayed import holds_delayed
from metamq.console.console_view import READ_S, ConsoleView, answer_or_problem, within_time
from metamq.console.messages import (
    COUNT,
    Question,
    body_text,
    decoded_messages,
    decoder_of,
    letter_summaries,
    letters_of,
    plain_text,
    raw_text,
    read_messages,
)  # fmt: skip
from metamq.errors import AuthenticationFailed, ConnectError, MetamqError, NotAuthorized, PartitionNotFound, Timeout

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from metamq.console.visitors import Visitors

log = logging.getLogger("metamq.console")

HERE = Path(__file__).parent
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Other names in the header Host are refused: a page of another site could lead its own name to this address."""
FORM_BYTES_MAX = 10_000
RESEND_S = 60.0
LOGIN = {"www-authenticate": 'Basic realm="metamq", charset="UTF-8"'}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
SHUTDOWN_S = 1
REFRESHES = ("2", "10", "60")
"""The seconds after which a page may load itself again."""
Page = Callable[[ConsoleView, Request], Awaitable[tuple[str, dict[str, Any]]]]


class QuietServer(Server):
    """Leaves signals to the command, whose exit status they decide."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Takes none."""
        yield


@dataclass(frozen=True, slots=True)
class ConsoleRules:
    """The hosts by which the console may be addressed, and whether its pages may change something."""

    hosts: Sequence[str] = HOSTS
    allow_changes: bool = False
    form_key: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)

    def form_token(self, user: str) -> str:
        """Returns the token of a visitor's forms. Pages of other sites do not know it, and so cannot send a form."""
        return hmac.new(self.form_key, user.encode(), hashlib.sha256).hexdigest()


def make_server(
    visitors: Visitors, rules: ConsoleRules, certificate: str | None = None, key: str | None = None
) -> Server:
    """Returns the server of the console; the caller gives it a socket that listens. With a certificate it uses TLS."""
    return QuietServer(
        Config(
            make_app(visitors, rules), log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_S, ws="none", ssl_certfile=certificate, ssl_keyfile=key,
        )
    )  # fmt: skip


def make_app(visitors: Visitors, rules: ConsoleRules) -> Starlette:
    """Returns the console. It connects to the cluster when it starts: raises ConnectError then."""

    @contextlib.asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        app.state.visitors, app.state.rules = visitors, rules
        async with visitors.open():
            yield

    pages: dict[str, Page] = {
        "/": _health, "/brokers": _brokers, "/topics": _topics, "/topic": _topic, "/groups": _groups, "/group": _group,
        "/messages": _messages, "/letters": _letters, "/transactions": _transactions,
    }  # fmt: skip
    routes = [Route(path, partial(_answer, page), methods=["GET"]) for path, page in pages.items()]
    if rules.allow_changes:
        routes.append(Route("/resend", partial(_answer, _resend), methods=["GET", "POST"]))
    return Starlette(
        routes=[*routes, Mount("/static", StaticFiles(directory=HERE / "static"))],
        middleware=[
            Middleware(SafeHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=[*rules.hosts], www_redirect=False),
        ],
        exception_handlers={MetamqError: _problem, HTTPException: _refused, Exception: _failed},
        lifespan=connected,
    )


class SafeHeaders:
    """Adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _templates() -> Environment:
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    filters: dict[str, Callable[..., str]] = {
        "number": _number,
        "size": lambda size: "–" if size is None else show_bytes(round(size)),
        "shown": lambda value: "–" if value is None else plain_text(str(value)),
        "age": show_age,
        "body": body_text,
        "raw": raw_text,
        "time": lambda when: "–" if when is None else when.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z",
        "flush": show_flush,
    }
    found.filters.update(filters)
    found.globals |= {
        "show_retention": show_retention, "age_ms": age_ms, "next_steps": next_steps, "who_decides": who_decides,
    }  # fmt: skip
    return found


TEMPLATES = _templates()


def _html(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    given = request.query_params
    refresh = given["refresh"] if given.get("refresh") in REFRESHES else ""
    others = urlencode([(name, value) for name, value in given.multi_items() if name != "refresh"])
    page = TEMPLATES.get_template(template)
    path = f"/{request.url.path.lstrip('/')}"  # //x would be a link to another host
    rules, user = request.app.state.rules, getattr(request.state, "user", "")
    shared = {"user": user, "allow_changes": rules.allow_changes, "form_token": rules.form_token(user)}
    return HTMLResponse(page.render(path=path, query=others, refresh=refresh, **shared, **values), status)


async def _answer(page: Page, request: Request) -> Response:
    visitors: Visitors = request.app.state.visitors
    view, request.state.user = await visitors.visit(request.headers.get("authorization", ""))
    template, values = await page(view, request)
    return _html(request, template, **values)


def _status(error: MetamqError) -> int:
    if isinstance(error, AuthenticationFailed):
        return 401
    if isinstance(error, NotAuthorized):
        return 403
    # Other errors name what is not there.
    return 503 if isinstance(error, ConnectError | Timeout) or type(error) is MetamqError else 404


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, MetamqError)
    status = _status(error)
    response = _html(request, "problem.html", status, problem=error.problem, hint=error.hint)
    response.headers.update(LOGIN if status == 401 else {})
    return response


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "Pages are read with GET, and change nothing." if error.status_code == 405 else ""
    response = _html(request, "problem.html", error.status_code, problem=error.detail, hint=hint)
    response.headers.update(error.headers or {})
    return response


def _failed(request: Request, _error: Exception) -> Response:
    """Answers for a fault of the console itself, which the server logs. Starlette sends it past all middleware."""
    problem = "the console failed to make this page"
    response = _html(request, "problem.html", 500, problem=problem, hint="Its log has the reason. Please report it.")
    response.headers.update(HEADERS)
    return response


async def _health(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    return "health.html", {"found": await view.examine()}


async def _brokers(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    load, replicas = await asyncio.gather(view.load(with_groups=False), answer_or_problem(view.admin.replicas()))
    problem = replicas.problem if isinstance(replicas, MetamqError) else ""
    return "brokers.html", {"load": load, "problem": problem, "replicas": {} if problem else replicas}


async def _topics(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    load = await view.load(with_groups=False)
    topics = [one for one in load.topics if not holds_delayed(one.topic)]
    return "topics.html", {"load": load, "topics": topics, "hidden": len(load.topics) - len(topics)}


async def _topic(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    name = _name(request)
    one, groups = await asyncio.gather(
        within_time(view.admin.describe_topic(name)), answer_or_problem(view.admin.groups())
    )
    if isinstance(groups, MetamqError):
        return "topic.html", {"one": one, "readers": [], "problem": groups.problem}
    readers = [group.group for group in groups.values() if name in group.topics]
    return "topic.html", {"one": one, "readers": readers, "problem": ""}


async def _groups(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    return "groups.html", {"load": await view.load(with_groups=True)}


async def _group(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    name = _name(request)
    one, why = await asyncio.gather(
        within_time(view.admin.describe_group(name)), answer_or_problem(view.admin.explain_group(name))
    )
    return "group.html", {"one": one, "why": why.problem if isinstance(why, MetamqError) else why.text}


async def _messages(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    given = {name: request.query_params.get(name, "").strip() for name in ("partition", "from", "key", "where")}
    name = _name(request)
    try:
        filters = all_of(
            parse_key(given["key"]) if given["key"] else None, (),
            (parse_condition(given["where"]),) if given["where"] else (),
        )  # fmt: skip
        question = Question(name, given["partition"], parse_place(given["from"] or f"-{COUNT}"), filters)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    described = await within_time(view.admin.describe_topic(name))
    if given["partition"] not in ("", *described.config.partition_names):
        raise PartitionNotFound(name, given["partition"], tuple(described.config.partition_names))
    decode = decoder_of(described)
    if decode is not None and filters is not None:
        question = replace(question, matches=lambda message: filters(decode(message)))
    found = await within_time(read_messages(view.client, described, question), READ_S)
    messages = found.messages if decode is None else await decoded_messages(found.messages, decode)
    unread = [part for part in described.partitions if part.problem and given["partition"] in ("", part.partition)]
    values = {"one": described, "given": given, "found": found, "messages": messages, "unread": unread}
    values["is_newest"] = question.is_newest
    return "messages.html", values


async def _letters(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    group = request.query_params.get("name")
    if group is None:
        summaries, uncounted = await within_time(letter_summaries(view.client, view.admin), READ_S)
        return "letters.html", {"summaries": summaries, "uncounted": uncounted}
    letters, is_cut = await within_time(letters_of(view.client, group), READ_S)
    if not letters:
        await within_time(view.admin.describe_group(group))  # raises ConfigError if there is no such group
    return "group_letters.html", {"group": group, "letters": letters, "is_cut": is_cut}


async def _resend(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    """Asks whether to send dead letters again; as a POST, sends them."""
    if request.method == "GET":
        return "resend.html", {"group": _name(request), "id": request.query_params.get("id"), "sent": None}
    form = await _form(request)
    group, letter = form.get("name", ""), form.get("id")
    selected = metamq.LetterFilter(ids=None if letter is None else [letter])
    async with metamq.aio.DeadLetterQueue(group, **view.client) as queue:
        sent = await within_time(queue.resend(selected), RESEND_S)
    if not sent:
        await within_time(view.admin.describe_group(group))  # raises ConfigError if there is no such group
    log.info("%s sent %d dead letters of group %r again", request.state.user or "a visitor", sent, group)
    return "resend.html", {"group": group, "id": letter, "sent": sent}


async def _form(request: Request) -> dict[str, str]:
    """Returns the fields of a form of this console. Raises HTTPException for other content."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES_MAX:
            raise HTTPException(413, f"the form has more than {FORM_BYTES_MAX:,} bytes")
    form = dict(parse_qsl(body.decode("ascii", "replace"), keep_blank_values=True))
    wanted = request.app.state.rules.form_token(request.state.user)
    if not hmac.compare_digest(form.get("token", "").encode(), wanted.encode()):
        raise HTTPException(403, "the form is not of this console, or the console has restarted: open the page again")
    return form


async def _transactions(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    return "transactions.html", {"found": await within_time(view.admin.transactions())}


def _name(request: Request) -> str:
    name = request.query_params.get("name")
    if name is None:
        raise HTTPException(400, f"{request.url.path} needs a name, as {request.url.path}?name=orders")
    return name
