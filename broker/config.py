"""The broker's settings: the `[broker]` section of the TOML file, METAMQ_BROKER_… variables, flags."""

from __future__ import annotations

from dataclasses import dataclass

from metamq.client.checks import check_ranges
from metamq.errors import ConfigError
from metamq.wire.limits import BATCH_BYTES_MAX, FRAME_BYTES_MAX
from metamq.zk.cluster.epochs import CLASSES

BROKER_ID_MAX = 65_535
REPLICA_MAX = CLASSES - 1
"""Each replica of a broker id has a class of epoch numbers of its own."""
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Every setting of one broker process. Construction validates: ConfigError names the field and its limits."""

    id: int = 0
    """Broker id: the replica group. Unique in a cluster."""
    replica: int = 0
    """This replica's number among those of the broker id; kept in its data folder, where another is an error."""
    learner: bool = False
    """A slave that never counts as in sync, and is never promoted without loss."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8123
    """Port to listen on; 0 takes a free one."""
    advertise: str = ""
    """Host that clients and slaves connect to, where it is not `host` (containers, NAT). Several, separated by commas,
    are tried in their order: those outside and those inside may reach it under different names."""
    data: str = "./metamq-data/broker"
    """Data folder; one broker a folder."""
    http_port: int = 8120
    """Port of /metrics, /healthz and /readyz; 0 takes a free one, -1 serves none."""
    session_timeout_ms: int = 10_000
    """ZooKeeper session time-out: how long a dead broker stays registered."""
    disk_reserve_bytes: int = 256 * MEBIBYTE
    """Writes are refused below this much free disk; reads and retention go on."""
    retention_check_s: float = 30.0
    """How often retention, checkpoints and free disk are looked after."""
    insync_lag_ms: int = 5_000
    """A slave that holds a master's writes up for so long leaves the in-sync set."""
    far_behind_bytes: int = 1024 * MEBIBYTE
    """A reader that is further behind in a partition may be told to read from a slave; 0 tells nobody."""
    replication_bytes_per_s: int = 0
    """A master sends no more to each slave; 0 is no limit."""
    scrub_bytes_per_s: int = 8 * MEBIBYTE
    """How much of the logs is verified in the background; 0 verifies nothing."""
    scrub_every_s: float = 86_400.0
    """How often all of the logs are verified, if `scrub_bytes_per_s` suffices for that."""
    drain_timeout_s: float = 10.0
    """How long a stop waits for requests under way."""
    branch_grace_ms: int = 10_000
    """A transaction over several brokers that its client does not end is left to it for so long; then they end it."""
    transactions_min_insync: int = 1
    """Replicas that must be in sync for transactions to be prepared and committed."""
    connections_max: int = 10_000
    """Further ones are turned away, but for slaves and administrators; also bounded by what the process's limit on open
    files leaves."""
    connections_per_address_max: int = 0
    """Of one IP address; 0 is no limit."""
    idle_timeout_s: float = 600.0
    """A connection that has never asked for anything is closed after so long; 0 keeps it."""
    unread_timeout_s: float = 300.0
    """A connection that does not read its answers is closed after so long, much earlier where their memory is short."""
    answer_memory_bytes: int = 256 * MEBIBYTE
    """Answers that are not read, of all connections; where it is used up, readers get one batch at a time."""
    request_memory_bytes: int = 256 * MEBIBYTE
    """Requests under way, of all connections; what is more waits unread until some are answered."""
    open_files_max: int = 0
    """Log files kept open; 0 takes half of the process's limit."""

    def __post_init__(self) -> None:
        limits = {
            "id": (0, BROKER_ID_MAX),
            "replica": (0, REPLICA_MAX),
            "insync_lag_ms": (100, 600_000),
            "far_behind_bytes": (0, 1 << 50),
            "replication_bytes_per_s": (0, 1 << 50),
            "transactions_min_insync": (1, 16),
            "port": (0, 65535),
            "http_port": (-1, 65535),
            "session_timeout_ms": (1000, 600_000),
            "disk_reserve_bytes": (2 * BATCH_BYTES_MAX, 1 << 50),
            "retention_check_s": (0.1, 3600),
            "scrub_bytes_per_s": (0, 1 << 50),
            "scrub_every_s": (0, 366 * 86_400),
            "drain_timeout_s": (0, 3600),
            "branch_grace_ms": (100, 600_000),
            "open_files_max": (0, 1 << 20),
            "connections_max": (1, 1 << 20),
            "connections_per_address_max": (0, 1 << 20),
            "idle_timeout_s": (0, 86_400),
            "unread_timeout_s": (1, 86_400),
            "answer_memory_bytes": (MEBIBYTE, 1 << 50),
            "request_memory_bytes": (FRAME_BYTES_MAX, 1 << 50),
        }
        real = "retention_check_s scrub_every_s drain_timeout_s idle_timeout_s unread_timeout_s"
        check_ranges("broker", self, limits, real=real)
        if not self.data:
            raise ConfigError("the broker's `data` folder is empty", hint="Give it with --data.")
