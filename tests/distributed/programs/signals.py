"""Signals that a process sends itself while it listens for interrupts; the option is `case`."""

import hashlib
import json
import os
import signal
import sys
import threading

from drivetrain.distributed.signals import Signals

interrupts = Signals((), (signal.SIGINT,), lambda _: None, print)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def heard():
    interrupts.open()
    try:
        interrupt()
    except KeyboardInterrupt:
        return
    raise AssertionError


def unheard():
    """Another thread sees the interrupt while the main one is in a call that gives nothing back to Python."""
    interrupts.open()
    seen, computing = [], threading.Event()

    def look():
        computing.wait()
        interrupt()
        while not seen and not done.is_set():
            if interrupts.unheard() > 0:
                seen.append(True)

    done, looking = threading.Event(), threading.Thread(target=look)
    looking.start()
    try:
        while not seen:
            computing.set()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000)
    except KeyboardInterrupt:
        done.set()
    looking.join()
    assert seen


def copy():
    interrupts.open()
    pid = os.fork()
    if pid == 0:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        os._exit(0 if usual and signal.set_wakeup_fd(-1) == -1 else 1)
    assert os.waitpid(pid, 0)[1] == 0


globals()[json.loads(sys.argv[1])["case"]]()
assert interrupts.unheard() == 0
interrupts.close()
assert signal.set_wakeup_fd(-1) == -1
