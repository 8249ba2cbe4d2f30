"""The pages of the console, and the rules that every answer obeys.

All pages are read with GET, and change nothing. Templates escape every value, so names and errors of other people are
text. No page has a script, and none asks another host.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

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

from metamq.cli.commands.tx import age_ms, next_steps, who_decides
from metamq.cli.messages.filters import all_of, parse_condition, parse_key
from metamq.cli.show.terminal import escaped
from metamq.cli.show.units import parse_place, show_age, show_bytes, show_flush, show_retention
from metamq.client.admin.aio_admin import Admin
from metamq.console.console_view import READ_S, ConsoleView, answer_or_problem, within_time
from metamq.console.messages import COUNT, Question, body_text, letter_summaries, letters_of, read_messages
from metamq.errors import ConnectError, MetamqError, PartitionNotFound

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from metamq.cli.context import Globals
    from metamq.console.console_view import Doctor

HERE = Path(__file__).parent
HOSTS = ("127.0.0.1", "localhost")
"""Other names in the header Host are refused: a page of another site could lead its own name to this address."""
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


def make_server(settings: Globals, doctor: Doctor) -> Server:
    """Returns the server of the console; the caller gives it a socket that listens."""
    app = make_app(settings, doctor)
    return QuietServer(
        Config(
            app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=SHUTDOWN_S, ws="none"
        )
    )


def make_app(settings: Globals, doctor: Doctor) -> Starlette:
    """Returns the console. It connects to the cluster when it starts: raises ConnectError then."""

    @contextlib.asynccontextmanager
    async def connected(app: Starlette) -> AsyncIterator[None]:
        client = {**settings.access()._asdict(), "config": settings.config_file}
        async with Admin(**client) as admin:
            view = app.state.view = ConsoleView(admin, client, doctor)
            with contextlib.closing(view):
                await answer_or_problem(view.load())  # so that the first page has rates
                yield

    pages: dict[str, Page] = {
        "/": _health, "/brokers": _brokers, "/topics": _topics, "/topic": _topic, "/groups": _groups, "/group": _group,
        "/messages": _messages, "/letters": _letters, "/transactions": _transactions,
    }  # fmt: skip
    return Starlette(
        routes=[
            *(Route(path, partial(_answer, page), methods=["GET"]) for path, page in pages.items()),
            Mount("/static", StaticFiles(directory=HERE / "static")),
        ],
        middleware=[
            Middleware(SafeHeaders),
            Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False),
        ],
        exception_handlers={MetamqError: _problem, HTTPException: _refused},
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
        "shown": lambda value: "–" if value is None else escaped(str(value)),
        "age": show_age,
        "body": body_text,
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
    return HTMLResponse(page.render(path=request.url.path, query=others, refresh=refresh, **values), status)


async def _answer(page: Page, request: Request) -> Response:
    template, values = await page(request.app.state.view, request)
    return _html(request, template, **values)


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, MetamqError)
    is_unknown = type(error) is not MetamqError and not isinstance(error, ConnectError)
    return _html(request, "problem.html", 404 if is_unknown else 503, problem=error.problem, hint=error.hint)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "The console changes nothing: it only answers GET." if error.status_code == 405 else ""
    response = _html(request, "problem.html", error.status_code, problem=error.detail, hint=hint)
    response.headers.update(error.headers or {})
    return response


async def _health(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    return "health.html", {"found": await view.examine()}


async def _brokers(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    load, replicas = await view.load(), await answer_or_problem(view.admin.replicas())
    problem = replicas.problem if isinstance(replicas, MetamqError) else ""
    return "brokers.html", {"load": load, "problem": problem, "replicas": {} if problem else replicas}


async def _topics(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    return "topics.html", {"load": await view.load()}


async def _topic(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    return "topic.html", {"one": await within_time(view.admin.describe_topic(_name(request)))}


async def _groups(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    return "groups.html", {"load": await view.load()}


async def _group(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    name = _name(request)
    one = await within_time(view.admin.describe_group(name))
    why = await answer_or_problem(view.admin.explain_group(name))
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
    found = await within_time(read_messages(view.client, described, question), READ_S)
    return "messages.html", {"one": described, "given": given, "found": found, "is_newest": question.is_newest}


async def _letters(view: ConsoleView, request: Request) -> tuple[str, dict[str, Any]]:
    group = request.query_params.get("name")
    if group is None:
        return "letters.html", {"summaries": await within_time(letter_summaries(view.client, view.admin), READ_S)}
    letters, is_cut = await within_time(letters_of(view.client, group), READ_S)
    return "group_letters.html", {"group": group, "letters": letters, "is_cut": is_cut}


async def _transactions(view: ConsoleView, _request: Request) -> tuple[str, dict[str, Any]]:
    return "transactions.html", {"found": await within_time(view.admin.transactions())}


def _name(request: Request) -> str:
    name = request.query_params.get("name")
    if name is None:
        raise HTTPException(400, f"{request.url.path} needs a name, as {request.url.path}?name=orders")
    return name
