"""The scheme `metamq` of MessageQueueTrigger."""

from __future__ import annotations

from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider
from airflow.triggers.base import BaseEventTrigger

from airflow_metamq.trigger import MetamqTrigger


class MetamqMessageQueueProvider(BaseMessageQueueProvider):
    """Makes a MetamqTrigger of `MessageQueueTrigger(scheme="metamq", ...)`, with the same arguments."""

    scheme = "metamq"

    def trigger_class(self) -> type[BaseEventTrigger]:
        """Returns the class of the trigger."""
        return MetamqTrigger
