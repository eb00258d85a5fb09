"""What headwater costs, beside what the machine itself can do: `python -m benchmarks --help`.

Every figure is measured together with its limit, in turns, so that a busy machine slows both. They use the public API; where one
must reach below it to prepare something, its docstring says so.
"""
