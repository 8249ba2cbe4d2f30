"""A transport of kombu, for Celery, that keeps tasks in topics of metamq. The import registers its URLs, `metamq://`."""

from kombu.transport import TRANSPORT_ALIASES

from celery_metamq.transport import Channel, Transport

TRANSPORT_ALIASES["metamq"] = "celery_metamq.transport:Transport"

__all__ = ["Channel", "Transport"]
