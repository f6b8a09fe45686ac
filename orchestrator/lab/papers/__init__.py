"""`moe-edge paper`: the tables and figures of four papers, measured on a model of the user.

One file per paper lists its tables and figures, each with the function that measures it. The
measurements are in `lab/study`, `lab/replay` and `lab/bench`.
"""
