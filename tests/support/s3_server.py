"""An S3 server for tests, and in front of it one that fails as it is told to; both in a process of their own.

Run as a program, it prints two ports: of the front, and of the server itself (moto's, in memory). It ends
when its standard input does. The front is told what to do by requests to "/faults": PUT a JSON list of rules,
GET how many requests have come since. A rule is what a request must be like (its "method", a "pattern" in its
path, how many such are to "skip", and how "many" it strikes), and what comes of it: its "kind".
"""

import http.client
import json
import logging
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = 3.0
"""Seconds that a "hang" takes to answer; more than the clients of these tests wait."""

ERRORS = {
    "SlowDown": (503, "Reduce your request rate."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "AccessDenied": (403, "Access Denied"),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchUpload": (404, "The specified upload does not exist"),
}
"""The kinds that are an answer of S3's own; the others are in `Front.handle_fault`."""


@dataclass
class State:  # what all requests have in common
    port: int = 0  # of the server that does the work
    rules: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


STATE = State()


class Front(BaseHTTPRequestHandler):  # one connection of a client
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer, of two packets, waits 40 ms for the other side

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_any(self) -> None:
        body = self.read_body()
        if self.path == "/faults":
            self.command_faults(body)
            return
        rule = self.met()
        if rule is None:
            self.answer(*self.forward(body))
        else:
            self.handle_fault(rule["kind"], body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815 - as http.server calls them

    def read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    def command_faults(self, body: bytes) -> None:
        with STATE.lock:
            found = json.dumps(STATE.requests).encode()
            if self.command == "PUT":
                STATE.rules = json.loads(body)
            STATE.requests.clear()
        self.answer(200, [("Content-Type", "application/json")], found)

    def met(self) -> dict[str, Any] | None:  # the rule that this request meets, and is struck by
        with STATE.lock:
            STATE.requests.append(f"{self.command} {self.path}")
            for rule in STATE.rules:
                if rule["method"] != self.command or not re.search(rule["pattern"], self.path):
                    continue
                if rule["skip"]:
                    rule["skip"] -= 1
                elif rule["many"]:
                    rule["many"] -= 1
                    return rule
        return None

    def handle_fault(self, kind: str, body: bytes) -> None:
        if kind in ERRORS:
            status, text = ERRORS[kind]
            answer = f"<Error><Code>{kind}</Code><Message>{text}</Message></Error>".encode()
            self.answer(status, [("Content-Type", "application/xml")], answer)
        elif kind == "refused":
            self.reset()
        elif kind == "lost answer":
            self.forward(body)
            self.reset()
        elif kind == "hang":
            time.sleep(HANG)
            self.close_connection = True
        elif kind == "cut short":  # the body ends before the length that was told
            status, headers, content = self.forward(body)
            self.answer(status, headers, content, cut=len(content) // 2)
        elif kind == "fewer bytes":  # and here the length is wrong as well
            status, headers, content = self.forward(body)
            self.answer(status, headers, content[: len(content) // 2])
        else:
            raise AssertionError(kind)

    def reset(self) -> None:  # end the connection the rude way
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", STATE.port)
        try:
            unsent = ("transfer-encoding", "expect")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in unsent}
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def answer(self, status: int, headers: Any, content: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        told = None
        for name, value in headers:
            if name.lower() == "content-length":
                told = value
            elif name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        # The answer to HEAD tells a length, and has no content.
        self.send_header("Content-Length", told if self.command == "HEAD" and told else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, ValueError):  # the client has gone, or `reset` has closed the connection
            self.close_connection = True

    def finish(self) -> None:
        with suppress(ConnectionError, ValueError):
            super().finish()


def main() -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    STATE.port = port
    front = ThreadingHTTPServer(("127.0.0.1", 0), Front)
    threading.Thread(target=front.serve_forever, daemon=True).start()
    print(front.server_address[1], port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
