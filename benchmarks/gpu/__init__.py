"""What is measured on an NVIDIA GPU: `make gpu`, whose program is tests/gpu/run.py.

Each part is a process, `python -m gpu PART --size full --rows FILE`, and appends what it finds to a file as
it comes, so that a part that is ended keeps its rows. `--size small` runs the same code in seconds on a CPU.
The page of a run, docs/explanation/gpu.md, is made by `python benchmarks/gpu/page.py`.
"""
