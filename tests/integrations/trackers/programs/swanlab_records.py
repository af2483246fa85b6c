"""Prints the values and the names of saved files in files of SwanLab, read by SwanLab's own reader."""

import json
import sys

from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

rows, saved = [], []
for path in sys.argv[1:]:
    reader = DataStoreReader()
    try:
        reader.open(path)
    except AssertionError:
        continue  # all was in memory when it was killed
    records = [Record.FromString(each) for each in reader]
    rows += [
        (each.scalar.step, each.scalar.key, each.scalar.value.number)
        for each in records
        if each.HasField("scalar") and not each.scalar.key.startswith("__")
    ]
    saved += [each.save.name for each in records if each.HasField("save")]
print(json.dumps([rows, saved]))
