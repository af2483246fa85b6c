"""Prints the kind of each value beside numbers in a repository of Aim, and its content in base 64."""

import base64
import json

from aim import Repo, Run
from aim.storage.context import Context

(run_hash,) = Repo("run").list_all_runs()
run = Run(run_hash, repo="run")
found = []
for kind, names in (("image", ("image", "video")), ("audio", ("audio",)), ("text", ("text", "table"))):
    for name in names:
        values = getattr(run, f"get_{kind}_sequence")(
            name, Context({"subset": "media"})
        ).values.sparse_list()[1]
        found += [
            (name, base64.b64encode(bytes(each.storage["data"])).decode())
            for each in values
            if kind != "text"
        ]
        found += [(name, base64.b64encode(each.data.encode()).decode()) for each in values if kind == "text"]
counts = run.get_distribution_sequence("histogram", Context({"subset": "media"})).values.sparse_list()[1]
found += [("histogram", base64.b64encode(each.weights.astype("u1").tobytes()).decode()) for each in counts]
print(json.dumps(found))
run.close()
