"""The torch library both model services stand on: backends, KV, sampling.

Importing it says how threads wait for each other. The OpenMP runtime of torch reads that once, when torch is
loaded, so it has to stand here. By default a waiting thread spins for milliseconds; where several services share
the cores it then keeps the very thread it waits for from running, and a step of 16 ms takes a second. A short
spin still bridges the gaps within a step.
"""

import os

if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "2000"
