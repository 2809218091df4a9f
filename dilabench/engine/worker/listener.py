"""Connections between machines: a listener that accepts peers that have the key and keeps them by name. No torch.

What passes are bytes that both ends check (JSON); nothing is ever unpickled.
"""

import contextlib
import os
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

KEY_BYTES = 32
CONNECT_TIMEOUT_S = 20.0
RETRY_S = 0.2
# A peer whose machine is gone is noticed after about a minute.
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class RankListener:
    """Listens on every address of this machine and keeps accepted connections by name until they are asked for."""

    def __init__(self) -> None:
        self.key = os.urandom(KEY_BYTES)
        self._listener = Listener(("0.0.0.0", 0), backlog=128, authkey=self.key)
        self.port: int = self._listener.address[1]
        self._came: dict[str, Connection] = {}
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._accept, name="dilabench-listener", daemon=True)
        self._thread.start()

    def wait(self, name: str, timeout_s: float) -> Connection | None:
        """The connection of the peer with this name; None when none came within `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._came, timeout_s)
            return self._came.pop(name, None)

    def close(self) -> None:
        """Stop accepting connections."""
        self._open = False
        # Closing does not end a pending accept; a connection of our own does.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), CONNECT_TIMEOUT_S):
            pass
        self._thread.join(CONNECT_TIMEOUT_S)
        self._listener.close()
        with self._changed:
            for connection in self._came.values():
                connection.close()

    def _accept(self) -> None:
        while self._open:
            # A peer without the key, or one that disconnected at once, is no reason to stop listening.
            with contextlib.suppress(AuthenticationError, OSError, EOFError):
                connection = self._listener.accept()
                _keep_alive(connection)
                name = connection.recv_bytes().decode()
                with self._changed:
                    self._came[name] = connection
                    self._changed.notify_all()


def connect(address: tuple[str, int], key: bytes, name: str, timeout_s: float = CONNECT_TIMEOUT_S) -> Connection:
    """Connect to a listener. Raises OSError when it does not answer in time, AuthenticationError for a wrong key."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = Client(address, authkey=key)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
    _keep_alive(connection)
    connection.send_bytes(name.encode())
    return connection


def disconnect(connection: Connection) -> None:
    """Shut a connection down, so that a thread waiting to receive from it wakes up."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        connection.close()


def address_towards(host: str, port: int) -> str:
    """The address under which others that reach `host` reach this machine, too: `host` itself where that is here."""
    with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as reached:
        own: str = reached.getsockname()[0]
        return host if own == reached.getpeername()[0] else own


def _keep_alive(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
