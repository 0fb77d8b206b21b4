"""``init()`` and ``shutdown()``: a driver joins a cluster, or starts one of its own, and leaves it.

The runtime is imported here only when it is needed: ``import stoker`` stays light, and a local head
starts while this process imports its own half.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from stoker.exceptions import BadRequestError, ConflictError, StokerError
from stoker.local.node_options import check_texts, checked_node_options, checked_port
from stoker.runtime.current import maybe_runtime, set_runtime
from stoker.runtime.process.current_runtime import LIFECYCLE
from stoker.runtime.process.identity import LocalNode
from stoker.runtime.process.notebook import html_table, is_interactive
from stoker_wire.ids import Prefix, new_id

if TYPE_CHECKING:
    from stoker.local.cluster import LocalCluster
    from stoker.local.sessions import LocalInfo
    from stoker.runtime.net.http import HttpClient
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.runtime import Runtime
    from stoker_wire.messages.common import RuntimeEnv
    from stoker_wire.settings import Settings

_JOIN_S = 5.0
"""The time for which a cluster that does not answer is tried: it may be starting."""
_ELECTION_S = 2.0
_CALL_S = 15.0
AUTO = "auto"
LOCAL = "local"
_SOCKET_PATH_BYTES = 104


class ClusterInfo(NamedTuple):
    """The result of ``init()``: the address of the cluster's HTTP API, and the job of this driver."""

    address: str
    job_id: str
    namespace: str
    node_id: str
    session_dir: str
    token: str

    @property
    def dashboard_url(self) -> str:
        """The host and port at which the HTTP API listens, without a scheme."""
        return urlsplit(self.address.partition(",")[0]).netloc

    @property
    def address_info(self) -> dict[str, str]:
        """The addresses and ids of the cluster by name, as programs log them."""
        host = urlsplit(self.address.partition(",")[0]).hostname or ""
        return {
            "address": self.address,
            "gcs_address": self.dashboard_url,
            "node_id": self.node_id,
            "node_ip_address": host,
            "session_dir": self.session_dir,
            "webui_url": self.dashboard_url,
        }

    def __enter__(self) -> ClusterInfo:
        return self

    def __exit__(self, *error: object) -> None:
        shutdown()

    def __repr__(self) -> str:
        return f"ClusterInfo(address={self.address!r}, job_id={self.job_id!r})"

    def _repr_html_(self) -> str:
        rows = {"address": self.address, "job": self.job_id, "namespace": self.namespace}
        return html_table("Stoker", rows, links={"dashboard": self._page})

    @property
    def _page(self) -> str:
        """The URL of the dashboard's page."""
        return f"{self.address.partition(',')[0].rstrip('/')}/"


def init(
    address: str | None = None,
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: float | None = None,
    object_store_memory: int | None = None,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    namespace: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    queue: str | None = None,
    priority: int = 0,
    token: str | None = None,
    port: int = 0,
    log_to_driver: bool | None = None,
    ignore_reinit_error: bool = False,
    local_mode: bool = False,
) -> ClusterInfo:
    """Connect this process to a cluster as a driver.

    Without ``address`` (and without ``STOKER_ADDRESS``), and with ``"local"``, a cluster is started on
    this machine, with ``num_cpus``, ``num_gpus``, ``memory`` (bytes), ``resources`` and ``labels``, and
    ``object_store_memory`` bytes of shared memory (None: ``STOKER_ARENA_MAX_BYTES``); it ends with this
    process. ``"http://host:port"`` (of several replicas with commas between) joins one that
    runs (its token from ``token`` or ``STOKER_TOKEN``): that of its gcs from a machine that reaches all
    nodes, that of its gateway from anywhere. And ``"auto"`` that of ``STOKER_ADDRESS``, else the newest
    that ``stoker start --head`` started here. All that this driver starts waits in ``queue``
    (``stoker queue list``), with ``priority`` added to its own. Raises UnavailableError where a
    cluster's scheduler cannot be reached. In ``local_mode`` tasks and actors run in this process, one after
    another, when they are called: for debuggers and tests.

    A second call is a ConflictError, unless ``ignore_reinit_error`` is set. In a notebook it prints what
    this process is connected to, unless it names another cluster; a local cluster that died is replaced.
    """
    with LIFECYCLE.lock:
        if (current := maybe_runtime()) is not None:
            if ignore_reinit_error:
                return _info_of(current)
            if not _is_cell_again(current, address):
                raise ConflictError(
                    "stoker.init() was called already in this process\n"
                    "call stoker.shutdown() first, or pass ignore_reinit_error=True"
                )
            if LIFECYCLE.cluster is None or LIFECYCLE.cluster.is_alive():
                info = _info_of(current)
                sys.stdout.write(
                    f"Stoker is connected to {info.address} already, as job {info.job_id} "
                    f"(dashboard: {info._page}; for other options call stoker.shutdown() first)\n"
                )
                return info
            _leave(exits=False)  # its cluster died: start another
        address = None if address == LOCAL else address or os.environ.get("STOKER_ADDRESS") or None
        node_options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "memory": memory,
            "object_store_memory": object_store_memory,
            "resources": resources,
            "labels": labels,
        }
        node_options, port = checked_node_options(node_options), checked_port(port)
        check_texts(namespace=namespace, queue=queue)
        driver_options = _DriverOptions(
            namespace, runtime_env, queue, priority, log_to_driver, local_mode
        )
        if address is None:
            return _init_local(node_options, port, driver_options)
        given = [name for name, value in node_options.items() if value is not None]
        if given:
            raise BadRequestError(
                f"{', '.join(given)}: this describes a cluster that init() starts\n"
                f"{address!r} names one that runs already",
                field=given[0],
            )
        return _init_remote(address, token, driver_options)


def _is_cell_again(current: Runtime, address: str | None) -> bool:
    """Return whether a notebook's cell with ``init()`` runs again, for the cluster that there is."""
    if not is_interactive():
        return False
    if address == LOCAL:
        return LIFECYCLE.cluster is not None
    return address in (None, AUTO, current.identity.gcs_url)


class _DriverOptions(NamedTuple):
    """The user's options for the job that this process becomes."""

    namespace: str | None
    runtime_env: Mapping[str, Any] | None
    queue: str | None
    priority: int
    log_to_driver: bool | None
    local_mode: bool


def _init_local(
    node_options: dict[str, Any], port: int, driver_options: _DriverOptions
) -> ClusterInfo:
    from stoker.local.cluster import spawn_local
    from stoker_wire.process import fast_imports
    from stoker_wire.settings import Settings

    arena = node_options.pop("object_store_memory")
    environ = {"STOKER_ARENA_MAX_BYTES": str(arena)} if arena is not None else None
    cluster = spawn_local(port=port, environ=environ, **node_options)
    try:
        # The head starts on another core while this process imports its own half.
        fast_imports.import_aiohttp()
        import stoker.runtime.runtime  # noqa: F401

        info: LocalInfo = cluster.wait_ready()
        node = LocalNode(info.node_id, info.nodelet_url, info.arena_dir, info.session_dir)
        cluster_info = _connect(
            info.gcs_url,
            info.token,
            node,
            driver_options,
            tcp_host="127.0.0.1" if Settings.from_env().run_as else None,
            head=cluster,
        )
    except BaseException:
        cluster.stop()
        raise
    LIFECYCLE.cluster = cluster
    return cluster_info


def _init_remote(address: str, token: str | None, driver_options: _DriverOptions) -> ClusterInfo:
    from stoker.local.address import resolve
    from stoker.runtime.net.http import HttpClient
    from stoker_wire.http.auth import is_loopback
    from stoker_wire.http.client.endpoints import urls_of
    from stoker_wire.messages.cluster import Node, NodeState
    from stoker_wire.messages.control import Page
    from stoker_wire.process import host_identity

    target = resolve(address, token, embedded=False)
    client = HttpClient(target.address, token=target.token, timeout_s=_JOIN_S)
    if _is_gateway(client):
        return _connect(
            target.address,
            target.token,
            None,
            driver_options,
            tcp_host=None,
            gateway_url=target.address,
        )
    nodes = client.call("GET", "/v1/nodes", reply=Page[Node], query={"limit": 1000}).items
    host_id = host_identity.host_id()
    local_nodes = [n for n in nodes if n.host_id == host_id and n.state is not NodeState.DEAD]
    node = None
    is_foreign = False
    if local_nodes:
        local_node = local_nodes[0]
        is_foreign = _is_closed(local_node.session_dir)
        if not is_foreign:
            node = LocalNode(
                local_node.node_id, local_node.url, local_node.arena_dir, local_node.session_dir
            )
    away = [url for url in urls_of(target.address) if not is_loopback(urlsplit(url).hostname or "")]
    tcp_host = _local_address(away[0]) if away else None
    is_root = os.geteuid() == 0 and not target.address.startswith("https:")
    if tcp_host is None and (is_foreign or is_root):
        # Processes of other users, as which root's nodelets run jobs, reach no Unix socket of this one.
        tcp_host = _local_address(urls_of(target.address)[0])
    return _connect(
        target.address,
        target.token,
        node,
        driver_options,
        tcp_host=tcp_host,
        is_foreign=is_foreign,
    )


def _is_closed(folder: str) -> bool:
    """Return whether a folder is another user's, who lets nobody in."""
    try:
        os.listdir(folder)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _is_gateway(client: HttpClient) -> bool:
    """Return whether a gateway answers by which drivers come: this process is outside of the network."""
    from stoker.exceptions import NotFoundError
    from stoker_wire.http.gateway.protocol import GATEWAY_PATH, GatewayInfo

    try:
        return client.call("GET", GATEWAY_PATH, reply=GatewayInfo).has_drivers
    except NotFoundError:
        return False


def _local_address(url: str) -> str:
    """Return the address by which this machine reaches ``url`` (no packet is sent)."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "", parts.port or 80))
        return str(probe.getsockname()[0])


def _connect(
    gcs_url: str,
    token: str,
    node: LocalNode | None,
    options: _DriverOptions,
    *,
    tcp_host: str | None,
    gateway_url: str = "",
    is_foreign: bool = False,
    head: LocalCluster | None = None,
) -> ClusterInfo:
    from stoker.runtime.driver.driver import Driver
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.runtime import Runtime
    from stoker_wire.http.auth import Credential
    from stoker_wire.process import host_identity
    from stoker_wire.settings import Settings

    settings = Settings.from_env()
    peer_id = new_id(Prefix.PEER)
    socket_path = ""
    if node is not None and node.session_dir:
        socket_path = _socket_path(node, peer_id)
    identity = Identity(
        peer_id=peer_id,
        gcs_url=gcs_url,
        credential=Credential(token),
        # Outside there is no memory that is shared with a node, even where it is of this machine.
        host_id="" if gateway_url else host_identity.host_id(),
        node=node,
        socket_path=socket_path,
        tcp_host=tcp_host,
        gateway_url=gateway_url,
        is_foreign=is_foreign,
    )
    runtime = Runtime(identity, settings)
    runtime.start()
    try:
        driver = Driver(
            identity,
            runtime.io,
            runtime.clients.gcs,
            runtime.job,
            runtime.pending,
            runtime.objects.unseen,
        )
        if head is None:
            _check_scheduler(runtime)
        env = _driver_env(runtime, node, options.runtime_env, settings)
        _configure_tracing(identity, settings)
        driver.attach(
            settings.job_id or None,
            env,
            namespace=options.namespace,
            queue=options.queue,
            priority=options.priority,
            attempt=settings.job_attempt,
        )
        show = settings.log_to_driver if options.log_to_driver is None else options.log_to_driver
        driver.begin(follow_logs=show)
        if head is not None:
            driver.watch_head(head)
    except BaseException:
        runtime.stop()
        raise
    if options.local_mode:
        from stoker.runtime.driver.inline import InlineCalls

        runtime.inline = InlineCalls(runtime.objects)
    set_runtime(runtime)
    LIFECYCLE.driver = driver
    LIFECYCLE.auto_init, LIFECYCLE.forked = True, False
    atexit.register(_leave_at_exit)
    return _info_of(runtime)


def _configure_tracing(identity: Identity, settings: Settings) -> None:
    """Take over the trace context of whoever started this driver; export spans if that is configured."""
    from stoker.runtime.process.tracing.context import TRACES, is_configured

    if not is_configured(os.environ, settings.otlp_endpoint):
        TRACES.enter_process("")
        return
    from stoker.runtime.process.tracing import tracer

    name = f"driver {os.path.basename(sys.argv[0] or 'python')}"
    resource = tracer.resource_of(identity)
    tracer.configure(os.environ, settings.otlp_endpoint, resource, span=name)


def _check_scheduler(runtime: Runtime) -> None:
    """Raise UnavailableError if this process cannot reach the scheduler that leads."""
    within_s = runtime.settings.leader_ttl_s + _ELECTION_S
    runtime.io.run(runtime.clients.reach_scheduler(within_s), within_s + _CALL_S)


def _socket_path(node: LocalNode, peer_id: str) -> str:
    """Return the path of this driver's socket: in the session, unless that is too long for a socket."""
    path = os.path.join(node.session_dir, "sockets", f"{peer_id}.sock")
    if len(os.fsencode(path)) < _SOCKET_PATH_BYTES:
        return path
    return f"/tmp/stoker-sock-{node.node_id}/{peer_id}.sock"  # the nodelet's folder, in that case


def _driver_env(
    runtime: Runtime,
    node: LocalNode | None,
    runtime_env: Mapping[str, Any] | None,
    settings: Settings,
) -> RuntimeEnv:
    """Return the job's environment: the user's and, on this machine, the folders of its code.

    Those are this process's ``sys.path`` as it is now, whichever way Python was started.
    """
    import msgspec

    from stoker_wire.process import search_path

    env = runtime.job.uploaded_env(runtime_env)
    if node is None or settings.job_id or env.working_dir:
        return env
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        cwd = ""
    paths = search_path.portable_path(sys.path, search_path.own_folders(), cwd)
    return msgspec.structs.replace(env, sys_path=paths, cwd=cwd or None)


def shutdown() -> None:
    """Leave the cluster: the job ends, and a cluster that ``init()`` started stops with it.

    A driver that does not call it leaves at its exit, and its exit code decides whether the job has
    SUCCEEDED.
    """
    _leave(exits=False)


def _leave_at_exit() -> None:
    _leave(exits=True)


def _leave(*, exits: bool) -> None:
    with LIFECYCLE.lock:
        runtime = maybe_runtime()
        LIFECYCLE.auto_init = LIFECYCLE.auto_init and runtime is None
        set_runtime(None)
        driver, LIFECYCLE.driver = LIFECYCLE.driver, None
        cluster, LIFECYCLE.cluster = LIFECYCLE.cluster, None
        if runtime is None:
            return
        atexit.unregister(_leave_at_exit)
        dead = cluster is not None and not cluster.is_alive()
        if driver is not None:
            with contextlib.suppress(StokerError):
                # A cluster of its own ends before this process does.
                driver.finish(reachable=not dead, exits=exits and cluster is None)
        runtime.stop()
        if cluster is not None:
            cluster.stop()


def _info_of(runtime: Runtime) -> ClusterInfo:
    node = runtime.identity.node
    return ClusterInfo(
        address=runtime.identity.gcs_url,
        job_id=runtime.job.job_id,
        namespace=runtime.job.namespace,
        node_id=node.node_id if node else "",
        session_dir=node.session_dir if node else "",
        token=runtime.identity.credential.given,
    )


LIFECYCLE.init = init
