"""The sections of the settings file, and the classes of their settings."""

from __future__ import annotations

from typing import Any

from metamq.broker.config import BrokerConfig
from metamq.client.fetch.consumer_options import ConsumerOptions
from metamq.client.producer.producer_core import ProducerOptions
from metamq.security.config import SecurityConfig

SECTIONS: dict[str, type[Any]] = {
    "broker": BrokerConfig,
    "producer": ProducerOptions,
    "consumer": ConsumerOptions,
    "security": SecurityConfig,
}
