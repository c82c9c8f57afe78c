"""gRPC under gevent, which locust's users are made of."""

import gevent
import grpc.experimental.gevent

_MAX_THREADS = 1_000


def prepare() -> None:
    """Keep gRPC's calls from blocking other users; to be called before anything makes a channel.

    gRPC waits for its events in threads of gevent's pool. There are 10 unless it is told otherwise, and where more
    users than that call at a time, all 10 come to wait for what only others could bring about: calls never end.
    """
    grpc.experimental.gevent.init_gevent()
    gevent.get_hub().threadpool.maxsize = _MAX_THREADS
