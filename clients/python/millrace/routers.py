"""The routers that a client knows: one channel each, which of them to ask next, and how long to wait before that."""
from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import grpc

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A router that comes back is to be found again soon, and one that went without a word is to be noticed.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0


class Routers:
    """Any thread."""

    def __init__(self, addresses: Sequence[str], credentials: grpc.ChannelCredentials | None, patience: float):
        if not addresses:
            raise ValueError("addresses is empty; a client needs at least one router")
        self.patience = patience
        self._channels = [
            grpc.insecure_channel(address, _CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, _CHANNEL_OPTIONS)
            for address in addresses
        ]
        self._good = 0  # the latest that answered

    def __len__(self) -> int:
        return len(self._channels)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class Search:
    """One call's way from router to router, as long as its patience lasts after the latest success."""

    def __init__(self, routers: Routers, timeout: float | None):
        self._routers = routers
        self._at = routers._good
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._failures = 0
        self._failing_since = 0.0

    def channel(self) -> grpc.Channel:
        return self._routers._channels[self._at]

    def time_left(self) -> float | None:
        """Seconds for gRPC; nothing without a timeout."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def succeeded(self) -> None:
        self._routers._good = self._at
        self._failures = 0

    def failed(self, wait: Callable[[float], bool | None]) -> bool:
        """On to the next router, after `wait(seconds)` where all have failed. False: patience is over, or `wait` said stop."""
        if self._failures == 0:
            self._failing_since = time.monotonic()
        self._failures += 1
        self._at = (self._at + 1) % len(self._routers)
        rounds = self._failures // len(self._routers)
        if rounds == 0:
            return True
        delay = min(_FIRST_DELAY_S * 2 ** (rounds - 1), _LONGEST_DELAY_S) * random.uniform(0.5, 1.0)
        if time.monotonic() + delay > self._failing_since + self._routers.patience:
            return False
        return not wait(delay)
