"""Subscriptions of consumers: the names of topics, and patterns that select topics by name, now and later.

In a pattern `*` is any text, `?` any character, and `[ab]` one of these, as in `metamq topic list 'orders.*'`. No name
of a topic has such a character. A pattern selects no dead-letter topic, no retry topic, and no topic of delayed
messages: a consumer of "*" must not read what it sends to its own dead letters.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import translate
from functools import lru_cache

from metamq.client.delayed import holds_delayed
from metamq.errors import ConfigError
from metamq.zk.names import DEAD_LETTER_SUFFIX, RETRY_SUFFIX, check_topic, is_pattern

_PATTERN = re.compile(r"(?:[A-Za-z0-9._*?-]|\[!?[A-Za-z0-9._-]+\])+")


def check_subscription(text: str) -> str:
    """Returns the text. Raises ConfigError if it is neither the name of a topic nor a pattern of such names."""
    if not isinstance(text, str) or not is_pattern(text):
        return check_topic(text)
    if _PATTERN.fullmatch(text) is None:
        hint = "* is any text, ? any character, [ab] one of these: '^orders-.*' of Kafka is 'orders-*' here."
        raise ConfigError(f"{text!r} is no pattern of topics: it matches no name", hint=hint)
    return text


def selected(subscribed: Collection[str], existing: Collection[str]) -> frozenset[str]:
    """Returns the subscribed names, and those of the existing topics that a subscribed pattern selects."""
    patterns = [_compiled(one) for one in subscribed if is_pattern(one)]
    if not patterns:
        return frozenset(subscribed)
    found = (name for name in existing if any(one.fullmatch(name) for one in patterns) and not _is_internal(name))
    return frozenset(one for one in subscribed if not is_pattern(one)).union(found)


def _is_internal(name: str) -> bool:
    return name.endswith((DEAD_LETTER_SUFFIX, RETRY_SUFFIX)) or holds_delayed(name)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))
