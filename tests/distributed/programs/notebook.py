"""Executes the cells of a notebook, a JSON list on standard input, in a kernel; writes their outputs."""

import json
import sys

import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=600, startup_timeout=600, kernel_name="python3").execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
