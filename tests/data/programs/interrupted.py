"""Ctrl-C comes while the main thread waits for a worker's batch; its traceback is kept."""

import multiprocessing
import os
import queue
import selectors
import signal
import sys
import threading
import time
from multiprocessing import connection, queues

from tests.support.indexed import Augmented, batches, source
from torch.utils.data import dataloader

WAITING = {each.__file__ for each in (selectors, threading, queue, queues, connection)}


class Slow(Augmented):  # makes the main thread wait
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)


def interrupt():
    waiting.wait()
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None and frame.f_code.co_filename in WAITING:
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename == dataloader.__file__:
            break
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


read = source(Slow(), workers=2, persistent_workers=True)
given = read.batches(0, 0)
next(given)
waiting = threading.Event()
thread = threading.Thread(target=interrupt)
thread.start()
caught = None
try:
    waiting.set()
    for epoch in range(10_000):
        batches(read, epoch)
except KeyboardInterrupt as error:
    caught = error  # and holds on to everything
thread.join()
assert caught is not None
assert not multiprocessing.active_children()
assert len(batches(read, 1)) == len(batches(source(), 1))
read.close()
