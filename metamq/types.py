"""The types of results, of their parts, and of settings, for annotations; `metamq` has the most usual ones."""

from metamq.client.admin.admin_model import (
    BrokerDescription,
    BrokerReplicas,
    BrokerStatistics,
    GroupDescription,
    GroupExplanation,
    GroupPartition,
    GroupSummary,
    MasterPlace,
    MemberDescription,
    OffsetChange,
    OffsetReset,
    OpenBranches,
    PartitionDescription,
    PartitionStatistics,
    PartitionTrim,
    PromotionPlan,
    RemovalPlan,
    ReplicaDescription,
    TokenDescription,
    TopicDescription,
    TopicSettings,
)
from metamq.client.consumer.aio_loop import ConsumerLoop
from metamq.client.consumer.health import PartitionHealth
from metamq.client.fetch.consumer_options import ConsumerOptions, ConsumerSettings
from metamq.client.fetch.inbox import RunningMessage
from metamq.client.group.assignment import RebalanceHealth
from metamq.client.handling.handler_figures import HandlerHealth
from metamq.client.offsets.offsets import CommitRequest
from metamq.client.producer.producer_api import ArrowTable, ProducerSettings
from metamq.client.producer.producer_core import ProducerOptions
from metamq.client.producer.producer_health import BrokerHealth, TopicHealth
from metamq.security.config import TlsFiles
from metamq.security.quotas import Quota
from metamq.security.rights import RightDecision, Rule
from metamq.tx.app.aio_dead_letters import LetterSummary
from metamq.zk.cluster.failover import Failover, Switch
from metamq.zk.cluster.schemas import TopicSchemas
from metamq.zk.cluster.topics import TopicConfig
from metamq.zk.groups.ownership import CommittedOffset, Ownership

__all__ = [
    "ArrowTable",
    "BrokerDescription",
    "BrokerHealth",
    "BrokerReplicas",
    "BrokerStatistics",
    "CommitRequest",
    "CommittedOffset",
    "ConsumerLoop",
    "ConsumerOptions",
    "ConsumerSettings",
    "Failover",
    "GroupDescription",
    "GroupExplanation",
    "GroupPartition",
    "GroupSummary",
    "HandlerHealth",
    "LetterSummary",
    "MasterPlace",
    "MemberDescription",
    "OffsetChange",
    "OffsetReset",
    "OpenBranches",
    "Ownership",
    "PartitionDescription",
    "PartitionHealth",
    "PartitionStatistics",
    "PartitionTrim",
    "ProducerOptions",
    "ProducerSettings",
    "PromotionPlan",
    "Quota",
    "RebalanceHealth",
    "RemovalPlan",
    "ReplicaDescription",
    "RightDecision",
    "Rule",
    "RunningMessage",
    "Switch",
    "TlsFiles",
    "TokenDescription",
    "TopicConfig",
    "TopicDescription",
    "TopicHealth",
    "TopicSchemas",
    "TopicSettings",
]
