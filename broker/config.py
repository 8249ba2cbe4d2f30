"""The broker's settings: the `[broker]` section of the TOML file, METAMQ_BROKER_… variables, flags."""

from __future__ import annotations

from dataclasses import dataclass

from metamq.client.checks import check_ranges
from metamq.errors import ConfigError
from metamq.wire.limits import BATCH_BYTES_MAX, FRAME_BYTES_MAX
from metamq.zk.cluster.epochs import CLASSES
from metamq.zk.cluster.failover import check_mode

BROKER_ID_MAX = 65_535
PROCESSES_MAX = 256
REPLICA_MAX = CLASSES - 1
"""Each replica of a broker id has a class of epoch numbers of its own."""
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Every setting of one broker process. Construction validates: ConfigError names the field and its limits."""

    id: int = 0
    """Broker id: the replica group. Unique in a cluster."""
    processes: int = 1
    """Processes of `metamq broker`, each with a broker id of its own: `id`, `id` + 1, and so on."""
    replica: int = 0
    """The number of this replica within the broker id. The data folder keeps it; another number there is an error."""
    learner: bool = False
    """True for a slave that never joins the in-sync set. Its promotion may always lose messages."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8123
    """Port to listen on; 0 takes a free one."""
    advertise: str = ""
    """Host for clients and slaves, if it differs from `host` (containers, NAT). Clients try several, separated by
    commas, in their order: the broker may have one name inside and another one outside."""
    data: str = "./metamq-data/broker"
    """Data folder; one broker per folder."""
    audit: str = ""
    """File of the audit log; `-` is standard error, empty is none."""
    audit_bytes_max: int = 64 * MEBIBYTE
    """The size at which the audit log begins a new file. Five older files are kept."""
    http_port: int = 8120
    """Port of /metrics, /healthz and /readyz; 0 takes a free one, -1 serves none."""
    http_host: str = ""
    """Address of that port, if it differs from `host`: a network that only scrapers reach."""
    http_tls: bool = False
    """True: that port uses TLS, and /metrics needs a certificate with the right `describe cluster`."""
    console_url: str = ""
    """Address of `metamq console`, to which the page `/` of that port has a link."""
    session_timeout_ms: int = 10_000
    """ZooKeeper session time-out: a crashed broker stays registered this long."""
    disk_reserve_bytes: int = 256 * MEBIBYTE
    """The broker refuses writes if less than this is free on the disk; reads and retention continue."""
    retention_check_s: float = 30.0
    """Seconds between two rounds of retention, checkpoints and checks of the free disk space."""
    failover: str = ""
    """auto or manual: the mode of this broker id if it has none yet. Later `metamq ha failover` changes it."""
    failover_pause_max_ms: int = 120_000
    """The longest pause between automatic switches of masters. It doubles from 2 s with each switch in ten minutes."""
    failover_return_ms: int = 120_000
    """The time for which the preferred replica is in sync before it becomes the master again."""
    alone_lease_s: float = 60.0
    """A master without a slave in sync takes writes for this time after its lease, if ZooKeeper does not answer."""
    insync_lag_ms: int = 5_000
    """A slave that delays the master's acknowledgements this long leaves the in-sync set."""
    far_behind_bytes: int = 1024 * MEBIBYTE
    """The master sends a reader that is further behind in a partition to a slave; 0 sends no reader away."""
    replication_bytes_per_s: int = 0
    """The rate at which a master sends to one slave; 0 is no limit."""
    scrub_bytes_per_s: int = 8 * MEBIBYTE
    """The rate at which logs are verified in the background; 0 verifies nothing."""
    scrub_every_s: float = 86_400.0
    """Seconds between two verifications of all logs, if `scrub_bytes_per_s` suffices."""
    group_lag_s: float = 30.0
    """Seconds between two readings of the lags of groups, for /metrics; 0 reads none."""
    group_expiry_s: float = 0.0
    """The offsets of a group that had no members for this time are removed; 0 keeps them."""
    drain_timeout_s: float = 10.0
    """Seconds that a stop waits for running requests."""
    branch_grace_ms: int = 10_000
    """The time for a client to end a transaction over several brokers. After it the brokers end the transaction."""
    transactions_min_insync: int = 1
    """Replicas that must be in sync for transactions to be prepared and committed."""
    connections_max: int = 10_000
    """More connections are refused, except those of slaves and administrators. The process's limit on open files may
    lower this number."""
    connections_per_address_max: int = 0
    """Connections from one IP address; 0 is no limit."""
    connections_per_principal_max: int = 0
    """Connections of one user or certificate; 0 is half of `connections_max`."""
    idle_timeout_s: float = 600.0
    """A connection without any request is closed after this time; 0 keeps it."""
    unread_timeout_s: float = 300.0
    """A connection that does not read its answers is closed after this time, or earlier if their memory is short."""
    search_timeout_s: float = 2.0
    """The broker's time for one request that looks up offsets by time. Other requests are served meanwhile."""
    answer_memory_bytes: int = 256 * MEBIBYTE
    """Memory for unread answers of all connections. When it is used up, readers get one batch at a time."""
    request_memory_bytes: int = 256 * MEBIBYTE
    """Memory for running requests of all connections. Further requests wait in their sockets."""
    open_files_max: int = 0
    """Log files kept open; 0 takes half of the process's limit."""

    def __post_init__(self) -> None:
        limits = {
            "id": (0, BROKER_ID_MAX),
            "processes": (1, PROCESSES_MAX),
            "replica": (0, REPLICA_MAX),
            "failover_pause_max_ms": (0, 3_600_000),
            "failover_return_ms": (0, 86_400_000),
            "insync_lag_ms": (100, 600_000),
            "far_behind_bytes": (0, 1 << 50),
            "replication_bytes_per_s": (0, 1 << 50),
            "transactions_min_insync": (1, 16),
            "port": (0, 65535),
            "audit_bytes_max": (4096, 1 << 50),
            "http_port": (-1, 65535),
            "session_timeout_ms": (1000, 600_000),
            "disk_reserve_bytes": (2 * BATCH_BYTES_MAX, 1 << 50),
            "retention_check_s": (0.1, 3600),
            "scrub_bytes_per_s": (0, 1 << 50),
            "scrub_every_s": (0, 366 * 86_400),
            "group_lag_s": (0, 3600),
            "group_expiry_s": (0, 10 * 366 * 86_400),
            "drain_timeout_s": (0, 3600),
            "alone_lease_s": (0, 86_400),
            "branch_grace_ms": (100, 600_000),
            "open_files_max": (0, 1 << 20),
            "connections_max": (1, 1 << 20),
            "connections_per_address_max": (0, 1 << 20),
            "connections_per_principal_max": (0, 1 << 20),
            "idle_timeout_s": (0, 86_400),
            "unread_timeout_s": (1, 86_400),
            "search_timeout_s": (0.01, 3600),
            "answer_memory_bytes": (MEBIBYTE, 1 << 50),
            "request_memory_bytes": (FRAME_BYTES_MAX, 1 << 50),
        }
        real = (
            "retention_check_s scrub_every_s group_lag_s group_expiry_s drain_timeout_s alone_lease_s idle_timeout_s "
            "unread_timeout_s search_timeout_s"
        )
        check_ranges("broker", self, limits, real=real)
        if self.failover:
            check_mode(self.failover)
        if self.console_url and not self.console_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the broker's `console_url` is {self.console_url!r}", hint="It begins with http:// or https://."
            )
        if not self.data:
            raise ConfigError("the broker's `data` folder is empty", hint="Give it with --data.")
